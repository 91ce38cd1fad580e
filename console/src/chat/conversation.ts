// The conversation, and the request and the stream of one answer.
import { events, send } from "../api";
import type { Settings } from "./settings";

/** A token, or several that together are whole characters. */
export interface Token {
  text: string;
  logprob: number;
  top: { text: string; logprob: number }[];
}

export interface ToolCall {
  id: string;
  name: string;
  arguments: string;
}

export interface Message {
  role: "user" | "assistant" | "tool";
  content: string;
  reasoning?: string;
  calls?: ToolCall[];
  callId?: string; // of a tool message
  tokens?: Token[];
  note?: string; // how the answer ended, and its speed
  failed?: boolean;
}

/** The body of POST /v1/chat/completions. Throws SyntaxError if a JSON field of the settings is invalid. */
export function requestBody(messages: Message[], settings: Settings): Record<string, unknown> {
  const body: Record<string, unknown> = {
    messages: [...(settings.system ? [{ role: "system", content: settings.system }] : []), ...messages.map(toWire)],
    stream: true,
    stream_options: { include_usage: true },
  };
  if (settings.model) body["model"] = settings.model;
  for (const [name, text] of Object.entries(settings.numbers)) if (text.trim()) body[name] = Number(text);
  if (settings.stop) body["stop"] = settings.stop.split("\n").filter((line) => line);
  if (settings.logprobs) Object.assign(body, { logprobs: true, top_logprobs: 5 });
  if (settings.schema.trim()) {
    body["response_format"] = { type: "json_schema", json_schema: { name: "answer", schema: JSON.parse(settings.schema) } };
  }
  if (settings.tools.trim()) Object.assign(body, { tools: JSON.parse(settings.tools), tool_choice: settings.toolChoice });
  return body;
}

function toWire(message: Message): Record<string, unknown> {
  if (message.role === "tool") return { role: "tool", content: message.content, tool_call_id: message.callId };
  if (!message.calls?.length) return { role: message.role, content: message.content };
  const calls = message.calls.map(({ id, name, arguments: text }) => ({ id, type: "function", function: { name, arguments: text } }));
  return { role: "assistant", content: message.content, tool_calls: calls };
}

/** Streams an answer to `messages` and calls `update` with it after each event. An abort ends it without an error. */
export async function generate(body: unknown, abort: AbortSignal, update: (answer: Message) => void): Promise<void> {
  let answer: Message = { role: "assistant", content: "" };
  const started = performance.now();
  let first = 0;
  let end = "";
  const pending = new TokenJoiner();
  try {
    const response = await send("v1/chat/completions", body, abort);
    for await (const event of events(response)) {
      if (event.error) throw new Error(event.error.message ?? String(event.error));
      const choice = event.choices?.[0];
      if (choice) {
        first ||= performance.now();
        answer = { ...answer, ...added(answer, choice, pending) };
        if (choice.finish_reason) end = choice.finish_reason;
      }
      if (event.usage) answer = { ...answer, note: noteOf(end, event.usage, started, first) };
      update(answer);
    }
  } catch (error) {
    if (abort.aborted) update({ ...answer, note: "stopped" });
    else update({ ...answer, failed: true, note: error instanceof Error ? error.message : String(error) });
  }
}

/** The changes of an answer by one event. */
function added(answer: Message, choice: any, pending: TokenJoiner): Partial<Message> {
  const delta = choice.delta ?? {};
  const changes: Partial<Message> = { content: answer.content + (delta.content ?? "") };
  const reasoning = delta.reasoning_content ?? delta.reasoning;
  if (reasoning) changes.reasoning = (answer.reasoning ?? "") + reasoning;
  if (choice.logprobs?.content) changes.tokens = [...(answer.tokens ?? []), ...choice.logprobs.content.flatMap((row: any) => pending.add(row))];
  if (delta.tool_calls) {
    const calls = [...(answer.calls ?? [])];
    for (const part of delta.tool_calls) {
      const call = calls[part.index] ?? { id: "", name: "", arguments: "" };
      calls[part.index] = {
        id: part.id ?? call.id,
        name: call.name + (part.function?.name ?? ""),
        arguments: call.arguments + (part.function?.arguments ?? ""),
      };
    }
    changes.calls = calls;
  }
  return changes;
}

function noteOf(end: string, usage: any, started: number, first: number): string {
  const seconds = (performance.now() - first) / 1000;
  const rate = usage.completion_tokens > 1 && seconds > 0 ? `, ${((usage.completion_tokens - 1) / seconds).toFixed(1)} tokens/s` : "";
  const cached = usage.prompt_tokens_details?.cached_tokens ? ` (${usage.prompt_tokens_details.cached_tokens} cached)` : "";
  const wait = first ? `, first after ${Math.round(first - started)} ms` : "";
  return `${end || "ended"}: ${usage.prompt_tokens} prompt tokens${cached}, ${usage.completion_tokens} new tokens${wait}${rate}`;
}

/** Joins tokens that are parts of one character, by their bytes. */
class TokenJoiner {
  private bytes: number[] = [];
  private logprob = 0;
  private top: Token["top"] = [];

  add(row: any): Token[] {
    if (this.bytes.length === 0) this.top = (row.top_logprobs ?? []).map((each: any) => ({ text: each.token, logprob: each.logprob }));
    this.logprob += row.logprob;
    this.bytes.push(...(row.bytes ?? new TextEncoder().encode(row.token)));
    const text = new TextDecoder().decode(new Uint8Array(this.bytes));
    if (text.endsWith("�") && this.bytes.length < 8) return [];
    const token = { text, logprob: this.logprob, top: this.top };
    this.bytes = [];
    this.logprob = 0;
    return [token];
  }
}
