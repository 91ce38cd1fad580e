// The live state of the server, which is requested every second while a view that shows it is visible.
import { signal } from "@preact/signals";
import { useEffect } from "preact/hooks";
import { adminKey, getJson, key } from "../api";

const INTERVAL_MS = 1000;
const HISTORY_S = 120;
const MAX_STEPS = 512;

export interface SequenceState {
  seq_id: number;
  request_id: string;
  index: number;
  status: string;
  age_s: number;
  prompt_tokens: number;
  cached_tokens: number;
  computed_tokens: number;
  generated_tokens: number;
  max_tokens: number;
  num_blocks: number;
  num_preemptions: number;
  priority: number;
}

export interface Tier {
  name: string;
  num_blocks: number;
  blocks_per_cell: number;
  used: number[];
  shared: number[];
  cached: number[];
}

export interface Histogram {
  bounds_s: number[];
  counts: number[];
}

export interface Live {
  time_s: number;
  model: string;
  models: { name: string; version: string; state: string; reason: string }[];
  unavailable: string | null;
  state: null | {
    stats: Record<string, number>;
    time_s: number;
    started_s: number;
    running?: SequenceState[]; // these three only with the detail
    waiting?: SequenceState[];
    tiers?: Tier[];
    next_step: number;
  };
  latency: Record<"ttft" | "inter_token", Histogram>;
}

/** One step. Rows up to numDecodes have one token; the next numVerifies rows also verify drafts; the others are prefills. */
export interface Step {
  number: number;
  end: number; // seconds
  duration: number;
  tokens: number;
  rows: { seqId: number; tokens: number; kind: "decode" | "verify" | "prefill" }[];
}

export const live = signal<Live | null>(null);
export const history = signal<Live[]>([]); // the answers of the last HISTORY_S seconds
export const steps = signal<Step[]>([]);
export const names = signal<Record<number, string>>({});
export const problem = signal("");
export const paused = signal(false);

/** Requests the live state with one part while a component is visible, the page too, and the view is not paused. */
export function useLive(visible: boolean, part: "counters" | "detail" | "steps"): void {
  useEffect(() => {
    if (!visible) return;
    let timer = 0;
    let active = true;
    const poll = async () => {
      if (!document.hidden && !paused.value) await fetchLive(part);
      if (active) timer = window.setTimeout(poll, INTERVAL_MS);
    };
    void poll();
    return () => {
      active = false;
      clearTimeout(timer);
    };
  }, [visible, part, key.value, adminKey.value]);
}

let executor: number | null = null; // the start of the executor whose steps are shown

async function fetchLive(part: "counters" | "detail" | "steps"): Promise<void> {
  const last = steps.value[steps.value.length - 1];
  const first = last ? last.number + 1 : 0;
  try {
    const query = { counters: "", detail: "?detail=1", steps: `?first_step=${first}` }[part];
    const answer = await getJson<Live & { steps: RawStep[]; row_sets: number[][]; names: Record<number, string> }>(`console/api/live${query}`);
    const restarted = answer.state !== null && executor !== null && executor !== answer.state.started_s;
    executor = answer.state?.started_s ?? executor;
    if (restarted) steps.value = [];
    live.value = answer;
    history.value = [...(restarted ? [] : history.value), answer].filter((each) => each.time_s > answer.time_s - HISTORY_S);
    if (part === "steps") {
      steps.value = [...steps.value, ...answer.steps.map((step) => readStep(step, answer.row_sets))].slice(-MAX_STEPS);
      const shown = new Set(steps.value.flatMap((step) => step.rows.map((row) => row.seqId)));
      names.value = Object.fromEntries(Object.entries({ ...names.value, ...answer.names }).filter(([id]) => shown.has(Number(id))));
    }
    problem.value = answer.unavailable ?? "";
  } catch (error) {
    problem.value = (error as Error).message;
  }
}

type RawStep = [number, number, number, number, number, number, number[]];

function readStep([number, end, duration, rowSet, numDecodes, numVerifies, numNew]: RawStep, rowSets: number[][]): Step {
  const rows = rowSets[rowSet]!.map((seqId, row) => ({
    seqId,
    tokens: row < numDecodes ? 1 : numNew[row - numDecodes]!,
    kind: row < numDecodes ? ("decode" as const) : row < numDecodes + numVerifies ? ("verify" as const) : ("prefill" as const),
  }));
  return { number, end, duration, tokens: rows.reduce((sum, row) => sum + row.tokens, 0), rows };
}

/** A quantile of the observations between two histograms, in seconds; interpolated within its bucket. NaN without observations. */
export function quantile(newest: Histogram, before: Histogram | undefined, fraction: number): number {
  const counts = newest.counts.map((count, bucket) => count - (before?.counts[bucket] ?? 0));
  const total = counts.reduce((sum, count) => sum + count, 0);
  let left = fraction * total;
  for (let bucket = 0; bucket < counts.length && total; bucket += 1) {
    const lower = bucket ? newest.bounds_s[bucket - 1]! : 0;
    const upper = newest.bounds_s[bucket] ?? lower;
    if (left <= counts[bucket]!) return lower + (upper - lower) * (left / counts[bucket]!);
    left -= counts[bucket]!;
  }
  return NaN;
}

/** The difference of a counter per second over the last `seconds`. NaN with less than two answers. */
export function rate(counter: string, seconds: number): number {
  const known = history.value.filter((each) => each.state);
  const newest = known[known.length - 1];
  const oldest = known.find((each) => each.time_s >= newest!.time_s - seconds);
  if (!newest || !oldest || newest === oldest) return NaN;
  return (newest.state!.stats[counter]! - oldest.state!.stats[counter]!) / (newest.time_s - oldest.time_s);
}
