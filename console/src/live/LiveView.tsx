import { count, duration, percent } from "../format";
import { BlockMap } from "./BlockMap";
import { history, type Histogram, live, paused, problem, quantile, rate, type SequenceState, useLive } from "./data";
import { Sparkline } from "./Sparkline";

const WINDOW_S = 30; // of latencies
const RATE_S = 5; // of rates

export function LiveView({ visible }: { visible: boolean }) {
  useLive(visible, "detail");
  const state = live.value?.state;
  return (
    <>
      <Toolbar />
      {state?.tiers && visible && (
        <>
          <Tiles />
          <h2>KV cache</h2>
          {state.tiers.map((tier) => (
            <BlockMap key={tier.name} tier={tier} tokensPerBlock={state.stats["tokens_per_block"]!} />
          ))}
          <Sequences title="Running" sequences={state.running ?? []} total={state.stats["num_running"]!} />
          <Sequences title="Waiting" sequences={state.waiting ?? []} total={state.stats["num_waiting"]! + state.stats["num_paused"]!} />
        </>
      )}
    </>
  );
}

export function Toolbar({ children }: { children?: preact.ComponentChildren }) {
  return (
    <div class="toolbar">
      <button type="button" aria-pressed={paused.value} onClick={() => (paused.value = !paused.value)}>
        {paused.value ? "Continue" : "Pause"}
      </button>
      {children}
      <span role="status" class={problem.value ? "problem" : "hint"}>
        {problem.value || (live.value ? `${live.value.model}, every second` : "loading")}
      </span>
    </div>
  );
}

function Tiles() {
  const stats = live.value!.state!.stats;
  const before = history.value.find((each) => each.time_s >= live.value!.time_s - WINDOW_S);
  const latency = (name: "ttft" | "inter_token") => percentiles(live.value!.latency[name], before === live.value ? undefined : before?.latency[name]);
  const reused = stats["num_reused_tokens"]!;
  const used = stats["num_blocks"]! - stats["num_free_blocks"]!;
  const tokenRates = history.value.slice(1).map((each, index) => perSecond(history.value[index]!, each));
  return (
    <dl class="tiles">
      <Tile name="Queue" value={count(stats["num_waiting"]! + stats["num_paused"]!)} note={`${count(stats["num_paused"]!)} preempted`} />
      <Tile name="Running" value={count(stats["num_running"]!)} note={`of ${count(stats["max_batch_size"]!)} rows`} />
      <Tile name="KV blocks in use" value={percent(used / stats["num_blocks"]!)} note={`${count(used)} of ${count(stats["num_blocks"]!)}`} />
      <Tile name="Generated tokens/s" value={shown(rate("num_decode_tokens", RATE_S))} note={`${shown(rate("num_prefill_tokens", RATE_S))} prompt tokens/s`}>
        <Sparkline values={tokenRates} label="Generated tokens per second in the last two minutes" />
      </Tile>
      <Tile name="Time to first token" {...latency("ttft")} />
      <Tile name="Inter-token latency" {...latency("inter_token")} />
      <Tile
        name="Prefix reuse"
        value={percent(reused / (reused + stats["num_prefill_tokens"]!))}
        note={`${count(reused)} prompt tokens since the start`}
      />
      <Tile
        name="Steps/s"
        value={shown(rate("num_steps", RATE_S))}
        note={`last: ${count(stats["last_step_rows"]!)} rows, ${count(stats["last_step_tokens"]!)} tokens, ${duration(stats["last_step_time_s"]!)}`}
      />
    </dl>
  );
}

/** Generated tokens per second between two answers. */
function perSecond(before: typeof live.value, after: typeof live.value): number {
  if (!before?.state || !after?.state) return 0;
  const tokens = after.state.stats["num_decode_tokens"]! - before.state.stats["num_decode_tokens"]!;
  return Math.max(0, tokens / (after.time_s - before.time_s));
}

function shown(value: number): string {
  return Number.isFinite(value) ? (value < 10 ? value.toFixed(1) : count(value)) : "–";
}

/** The median of the last WINDOW_S seconds, or since the start if nothing happened in them; and higher percentiles. */
function percentiles(newest: Histogram, before: Histogram | undefined): { value: string; note: string } {
  const recent = Number.isFinite(quantile(newest, before, 0.5));
  const at = (fraction: number) => duration(quantile(newest, recent ? before : undefined, fraction));
  const since = recent && before ? `last ${WINDOW_S} s` : "since the start";
  return { value: at(0.5), note: `p90 ${at(0.9)}, p99 ${at(0.99)}; ${since}` };
}

function Tile({ name, value, note, children }: { name: string; value: string; note: string; children?: preact.ComponentChildren }) {
  return (
    <div class="tile">
      <dt>{name}</dt>
      <dd class="value">{value}</dd>
      <dd class="hint">{note}</dd>
      {children && <dd>{children}</dd>}
    </div>
  );
}

function Sequences({ title, sequences, total }: { title: string; sequences: SequenceState[]; total: number }) {
  const more = total > sequences.length ? ` (the first ${sequences.length} are shown)` : "";
  return (
    <>
      <h2>
        {title}: {count(total)}
        {more}
      </h2>
      {sequences.length > 0 && (
        <div class="scroll" tabIndex={0} role="region" aria-label={`${title} sequences`}>
          <table>
            <thead>
              <tr>
                <th scope="col">Request</th>
                <th scope="col">Progress</th>
                <th scope="col">Prompt</th>
                <th scope="col">Cached</th>
                <th scope="col">Generated</th>
                <th scope="col">Blocks</th>
                <th scope="col">Age</th>
                <th scope="col">Preempted</th>
              </tr>
            </thead>
            <tbody>
              {sequences.map((seq) => (
                <tr key={seq.seq_id}>
                  <th scope="row">
                    <code>{seq.request_id}</code>
                    {seq.index > 0 && ` [${seq.index}]`}
                  </th>
                  <td>
                    <progress
                      max={seq.prompt_tokens + seq.max_tokens}
                      value={seq.computed_tokens}
                      aria-label={`${seq.computed_tokens} of at most ${seq.prompt_tokens + seq.max_tokens} tokens`}
                    />
                  </td>
                  <td>{count(seq.prompt_tokens)}</td>
                  <td>{count(seq.cached_tokens)}</td>
                  <td>
                    {count(seq.generated_tokens)} / {count(seq.max_tokens)}
                  </td>
                  <td>{count(seq.num_blocks)}</td>
                  <td>{duration(seq.age_s)}</td>
                  <td>{count(seq.num_preemptions)}</td>
                </tr>
              ))}
            </tbody>
          </table>
        </div>
      )}
    </>
  );
}
