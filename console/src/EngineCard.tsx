import { useEffect, useState } from "preact/hooks";
import { adminKey, getJson, key } from "./api";
import { bytes, count, percent, plural } from "./format";

interface Card {
  name: string;
  stoker_version: string;
  model: { architecture: string; vocab_size: number; hidden_size: number; max_positions: number; layers: { count?: number }[] };
  recipe: { name: string; default: Record<string, unknown>; overrides: Record<string, unknown>; kv_cache: string | null };
  limits: Record<string, number | null>;
  dtype: string;
  mapping: { tensor_parallel: number; pipeline_parallel: number };
  target: { device: string; compute_capability: string | null };
  checkpoint: { name: string; fingerprint: string };
  checks: {
    accuracy?: { perplexity_before: number; perplexity_after: number; increase: number; greedy_agreement: number; tokens: number; skipped: string };
    greedy?: { equal?: number; tokens?: number; skipped?: string };
  };
  num_bytes: number;
  weight_bytes: number;
  memory: Record<string, number>;
  device: string;
}

export function EngineCard({ visible, ready }: { visible: boolean; ready: boolean }) {
  const [card, setCard] = useState<Card | null>(null);
  const [problem, setProblem] = useState("");
  useEffect(() => {
    if (!visible) return;
    getJson<Card>("console/api/engine").then(
      (found) => (setCard(found), setProblem("")),
      (error: Error) => (setCard(null), setProblem(error.message)),
    );
  }, [visible, ready, key.value, adminKey.value]);
  if (!card) return <p class="problem">{problem}</p>;
  const layers = card.model.layers.reduce((sum, group) => sum + (group.count ?? 1), 0);
  const overrides = Object.keys(card.recipe.overrides).length;
  const format = Object.entries(card.recipe.default).map(([name, value]) => `${name} ${String(value)}`);
  return (
    <section class="engine-card" aria-label="Engine">
      <h2>Engine {card.name}</h2>
      <dl>
        <Entry name="Architecture" value={`${card.model.architecture}, ${layers} layers, hidden size ${count(card.model.hidden_size)}`} />
        <Entry name="Vocabulary, positions" value={`${count(card.model.vocab_size)}, ${count(card.model.max_positions)}`} />
        <Entry name="Size on disk" value={`${bytes(card.num_bytes)}, of which weights ${bytes(card.weight_bytes)}`} />
        <Entry name="Quantization" value={`${card.recipe.name}: ${format.join(", ")}${overrides ? `; ${plural(overrides, "linear")} with other formats` : ""}`} />
        <Entry name="KV cache" value={card.recipe.kv_cache ?? card.dtype} />
        <Entry name="Perplexity" value={perplexity(card)} />
        <Entry name="Greedy tokens" value={greedy(card)} />
        <Entry name="Activations" value={card.dtype} />
        <Entry name="Ranks" value={`${card.mapping.tensor_parallel} tensor-parallel, ${card.mapping.pipeline_parallel} pipeline stages`} />
        <Entry name="Target" value={[card.target.device, card.target.compute_capability].filter(Boolean).join(" ")} />
        <Entry
          name="Limits"
          value={Object.entries(card.limits)
            .filter(([, limit]) => limit !== null)
            .map(([name, limit]) => `${name} ${count(limit!)}`)
            .join(", ")}
        />
        <Entry name="Checkpoint" value={`${card.checkpoint.name} (SHA-256 ${card.checkpoint.fingerprint.slice(0, 12)}…)`} />
        <Entry name="Built with" value={`Stoker ${card.stoker_version}`} />
      </dl>
      <MemoryBudget memory={card.memory} device={card.device} />
    </section>
  );
}

function Entry({ name, value }: { name: string; value: string }) {
  return (
    <div>
      <dt>{name}</dt>
      <dd>{value}</dd>
    </div>
  );
}

function perplexity({ checks: { accuracy } }: Card): string {
  if (!accuracy) return "not measured by this build";
  if (accuracy.skipped) return `not measured: ${accuracy.skipped}`;
  const sign = accuracy.increase < 0 ? "−" : "+";
  const change = `${sign}${(Math.abs(accuracy.increase) * 100).toFixed(2)} %`;
  return `${accuracy.perplexity_before.toFixed(3)} before, ${accuracy.perplexity_after.toFixed(3)} after quantization (${change}), on ${count(accuracy.tokens)} tokens`;
}

function greedy({ checks: { greedy: found } }: Card): string {
  if (!found) return "not compared by this build";
  return found.skipped ? `not compared: ${found.skipped}` : `${found.equal} of ${found.tokens} equal those of the checkpoint`;
}

function MemoryBudget({ memory, device }: { memory: Record<string, number>; device: string }) {
  const { total, ...parts } = memory;
  if (!total) return null;
  return (
    <>
      <h2>
        Memory of the {device} device: {bytes(total)}
      </h2>
      <table class="memory">
        <thead>
          <tr>
            <th scope="col">Purpose</th>
            <th scope="col">Size</th>
            <th scope="col">Part</th>
          </tr>
        </thead>
        <tbody>
          {Object.entries(parts).map(([name, size]) => (
            <tr key={name}>
              <th scope="row">{name}</th>
              <td>{bytes(size)}</td>
              <td>
                <meter max={total} value={Math.max(0, size)} aria-label={`${name}: ${percent(size / total)}`} /> {percent(size / total)}
              </td>
            </tr>
          ))}
        </tbody>
      </table>
    </>
  );
}
