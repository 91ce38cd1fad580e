// The newest steps: a column for each step and a lane for each sequence.
import { useSignal } from "@preact/signals";
import { useMemo } from "preact/hooks";
import { count, duration, plural } from "../format";
import { useCanvas } from "./canvas";
import { names, type Step, steps, useLive } from "./data";
import { Toolbar } from "./LiveView";

const LANE = 18; // pixels
const AXIS = 34; // height of the bar chart of durations
const MAX_LANES = 40;
const COUNTS = [32, 64, 128, 256];

/** The sequences of the shown steps in the order of their first step, and the number of those without a lane. */
function lanesOf(shown: Step[]): { lanes: number[]; hidden: number } {
  const order = [...new Set(shown.flatMap((step) => step.rows.map((row) => row.seqId)))];
  return { lanes: order.slice(-MAX_LANES), hidden: Math.max(0, order.length - MAX_LANES) };
}

export function Timeline({ visible }: { visible: boolean }) {
  useLive(visible, "steps");
  const numSteps = useSignal(64);
  const selected = useSignal<number | null>(null); // number of a step
  const asTable = useSignal(false);
  const shown = steps.value.slice(-numSteps.value);
  const { lanes, hidden } = useMemo(() => lanesOf(shown), [steps.value, numSteps.value]);
  const step = shown.find((each) => each.number === selected.value);
  return (
    <>
      <Toolbar>
        <label>
          Steps{" "}
          <select value={numSteps.value} onChange={(event) => (numSteps.value = Number(event.currentTarget.value))}>
            {COUNTS.map((each) => (
              <option key={each}>{each}</option>
            ))}
          </select>
        </label>
        <label class="check">
          <input type="checkbox" checked={asTable.value} onChange={(event) => (asTable.value = event.currentTarget.checked)} /> Table
        </label>
      </Toolbar>
      {visible && shown.length === 0 && <p class="hint">No step has run yet. Steps appear here while requests are running.</p>}
      {visible && shown.length > 0 && (asTable.value ? <Table shown={shown} /> : <Chart shown={shown} lanes={lanes} selected={selected} />)}
      {hidden > 0 && <p class="hint">{count(hidden)} earlier sequences have no lane.</p>}
      <ul class="legend">
        <li>
          <span class="swatch prefill" /> prefill
        </li>
        <li>
          <span class="swatch decode" /> decode
        </li>
        <li>
          <span class="swatch verify" /> decode with draft tokens
        </li>
      </ul>
      <div role="status" class="step-detail">
        {step ? <Detail step={step} /> : <p class="hint">Point at a step, or select one with the arrow keys.</p>}
      </div>
    </>
  );
}

function Chart({ shown, lanes, selected }: { shown: Step[]; lanes: number[]; selected: { value: number | null } }) {
  const longest = Math.max(...shown.map((step) => step.duration));
  const canvas = useCanvas((context, width, height, colours) => {
    const column = width / shown.length;
    const laneOf = new Map(lanes.map((seqId, lane) => [seqId, lane]));
    context.font = "10px system-ui, sans-serif";
    context.textBaseline = "middle";
    shown.forEach((step, index) => {
      const left = index * column;
      const bar = (step.duration / longest) * (AXIS - 6);
      if (step.number === selected.value) {
        context.fillStyle = colours("highlight");
        context.fillRect(left, 0, column, height);
      }
      context.fillStyle = colours("muted");
      context.fillRect(left + 0.5, AXIS - 3 - bar, Math.max(column - 1, 0.5), bar);
      for (const row of step.rows) {
        const lane = laneOf.get(row.seqId);
        if (lane === undefined) continue;
        const top = AXIS + lane * LANE;
        context.fillStyle = colours(row.kind);
        context.fillRect(left + 0.5, top + 1, Math.max(column - 1, 0.5), LANE - 2);
        const text = String(row.tokens);
        if (row.tokens > 1 && context.measureText(text).width < column - 2) {
          context.fillStyle = colours("on-colour");
          context.fillText(text, left + 2, top + LANE / 2);
        }
      }
    });
  });
  const select = (event: MouseEvent) => {
    const box = (event.currentTarget as HTMLElement).getBoundingClientRect();
    const index = Math.floor(((event.clientX - box.left) / box.width) * shown.length);
    selected.value = shown[Math.min(shown.length - 1, Math.max(0, index))]!.number;
  };
  const move = (event: KeyboardEvent) => {
    const change = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (event.key === "Escape") selected.value = null;
    if (change === undefined) return;
    event.preventDefault();
    const index = shown.findIndex((step) => step.number === selected.value);
    selected.value = shown[index < 0 ? shown.length - 1 : Math.min(shown.length - 1, Math.max(0, index + change))]!.number;
  };
  const first = shown[0]!;
  const last = shown[shown.length - 1]!;
  return (
    <div class="timeline">
      <ol class="lanes" aria-label="Sequences">
        <li class="axis">duration, at most {duration(longest)}</li>
        {lanes.map((seqId) => (
          <li key={seqId} title={names.value[seqId]}>
            {names.value[seqId] ?? `sequence ${seqId}`}
          </li>
        ))}
      </ol>
      <canvas
        ref={canvas}
        tabIndex={0}
        role="application"
        aria-roledescription="step timeline"
        aria-label={`Steps ${first.number} to ${last.number}, ${lanes.length} sequences. The left and right arrow keys select a step.`}
        style={{ height: `${AXIS + lanes.length * LANE}px` }}
        onMouseMove={select}
        onKeyDown={move}
      />
    </div>
  );
}

function Detail({ step }: { step: Step }) {
  return (
    <>
      <p>
        Step {step.number}: {duration(step.duration)}, {plural(step.rows.length, "row")}, {plural(step.tokens, "token")}
      </p>
      <ul>
        {step.rows.slice(0, MAX_LANES).map((row) => (
          <li key={row.seqId}>
            <code>{names.value[row.seqId] ?? row.seqId}</code>: {row.kind}, {plural(row.tokens, "token")}
          </li>
        ))}
      </ul>
    </>
  );
}

function Table({ shown }: { shown: Step[] }) {
  return (
    <div class="scroll" tabIndex={0} role="region" aria-label="Steps">
      <table>
        <thead>
          <tr>
            <th scope="col">Step</th>
            <th scope="col">Duration</th>
            <th scope="col">Rows</th>
            <th scope="col">Tokens</th>
            <th scope="col">Tokens of each sequence</th>
          </tr>
        </thead>
        <tbody>
          {[...shown].reverse().map((step) => (
            <tr key={step.number}>
              <th scope="row">{step.number}</th>
              <td>{duration(step.duration)}</td>
              <td>{step.rows.length}</td>
              <td>{step.tokens}</td>
              <td>{step.rows.map((row) => `${names.value[row.seqId] ?? row.seqId}: ${row.tokens}`).join(", ")}</td>
            </tr>
          ))}
        </tbody>
      </table>
    </div>
  );
}
