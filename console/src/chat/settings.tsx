// The parameters of chat requests. They are stored in localStorage.
import { signal } from "@preact/signals";

export interface Settings {
  model: string;
  system: string;
  numbers: Record<string, string>; // field of the request → text of the input; empty: the server's default
  stop: string;
  logprobs: boolean;
  schema: string;
  tools: string;
  toolChoice: string;
}

interface NumberField {
  name: string;
  label: string;
  min: number;
  max: number;
  step: number | "any";
}

const NUMBERS: NumberField[] = [
  { name: "max_tokens", label: "Maximum new tokens", min: 1, max: 1 << 24, step: 1 },
  { name: "temperature", label: "Temperature", min: 0, max: 100, step: "any" },
  { name: "top_p", label: "Top p", min: 0, max: 1, step: "any" },
  { name: "top_k", label: "Top k", min: 0, max: 1 << 24, step: 1 },
  { name: "min_p", label: "Min p", min: 0, max: 1, step: "any" },
  { name: "repetition_penalty", label: "Repetition penalty", min: 0.01, max: 100, step: "any" },
  { name: "presence_penalty", label: "Presence penalty", min: -2, max: 2, step: "any" },
  { name: "frequency_penalty", label: "Frequency penalty", min: -2, max: 2, step: "any" },
  { name: "seed", label: "Seed", min: 0, max: Number.MAX_SAFE_INTEGER, step: 1 },
];

const STORED = "stoker-chat-settings";
const DEFAULTS: Settings = { model: "", system: "", numbers: {}, stop: "", logprobs: false, schema: "", tools: "", toolChoice: "auto" };

function stored(): Settings {
  try {
    return { ...DEFAULTS, ...JSON.parse(localStorage.getItem(STORED) ?? "{}") };
  } catch {
    return DEFAULTS;
  }
}

export const settings = signal<Settings>(stored());

export function change(changes: Partial<Settings>): void {
  settings.value = { ...settings.value, ...changes };
  localStorage.setItem(STORED, JSON.stringify(settings.value));
}

/** Why a text is not JSON; empty if it is, or if there is no text. */
export function jsonProblem(text: string): string {
  if (!text.trim()) return "";
  try {
    JSON.parse(text);
    return "";
  } catch (error) {
    return String((error as Error).message);
  }
}

export function SettingsForm({ models }: { models: string[] }) {
  const now = settings.value;
  return (
    <form class="settings" onSubmit={(event) => event.preventDefault()} aria-label="Parameters">
      {models.length > 1 && (
        <label>
          Model
          <select value={now.model} onChange={(event) => change({ model: event.currentTarget.value })}>
            {models.map((name) => (
              <option key={name}>{name}</option>
            ))}
          </select>
        </label>
      )}
      <label>
        System message
        <textarea rows={2} value={now.system} onInput={(event) => change({ system: event.currentTarget.value })} />
      </label>
      <div class="numbers">
        {NUMBERS.map(({ name, label, ...bounds }) => (
          <label key={name}>
            {label}
            <input
              type="number"
              {...bounds}
              placeholder="default"
              value={now.numbers[name] ?? ""}
              onInput={(event) => change({ numbers: { ...now.numbers, [name]: event.currentTarget.value } })}
            />
          </label>
        ))}
      </div>
      <label>
        Stop strings, one per line
        <textarea rows={2} value={now.stop} onInput={(event) => change({ stop: event.currentTarget.value })} />
      </label>
      <label class="check">
        <input type="checkbox" checked={now.logprobs} onChange={(event) => change({ logprobs: event.currentTarget.checked })} />
        Token probabilities
      </label>
      <JsonField label="Guided output: JSON schema of the answer" value={now.schema} onChange={(schema) => change({ schema })} />
      <JsonField label="Tools: JSON list of functions" value={now.tools} onChange={(tools) => change({ tools })} />
      {now.tools.trim() && (
        <label>
          Tool choice
          <select value={now.toolChoice} onChange={(event) => change({ toolChoice: event.currentTarget.value })}>
            <option>auto</option>
            <option>required</option>
            <option>none</option>
          </select>
        </label>
      )}
      <button type="button" class="quiet" onClick={() => change(DEFAULTS)}>
        Reset parameters
      </button>
    </form>
  );
}

function JsonField({ label, value, onChange }: { label: string; value: string; onChange: (text: string) => void }) {
  const problem = jsonProblem(value);
  return (
    <label>
      {label}
      <textarea rows={4} class="code" spellcheck={false} aria-invalid={!!problem} value={value} onInput={(event) => onChange(event.currentTarget.value)} />
      {problem && (
        <span class="problem" role="status">
          {problem}
        </span>
      )}
    </label>
  );
}
