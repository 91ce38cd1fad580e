// Requests to the server. The keys are in sessionStorage, and are sent as a header only.
import { signal } from "@preact/signals";

const KEY = "stoker-api-key";
const ADMIN_KEY = "stoker-admin-key";

export const key = signal(sessionStorage.getItem(KEY) ?? "");
/** For the routes of the console itself, if the server has an admin key. */
export const adminKey = signal(sessionStorage.getItem(ADMIN_KEY) ?? "");
/** Why the server refused the key, or "" if it did not. */
export const keyProblem = signal("");

export function setKeys(apiKey: string, admin: string): void {
  adminKey.value = store(ADMIN_KEY, admin);
  key.value = store(KEY, apiKey);
  keyProblem.value = "";
}

function store(name: string, value: string): string {
  if (value.trim()) sessionStorage.setItem(name, value.trim());
  else sessionStorage.removeItem(name);
  return value.trim();
}

export class ServerError extends Error {
  constructor(
    readonly status: number,
    message: string,
  ) {
    super(message);
  }
}

/** Sends a request to a path relative to the page. Throws ServerError for a status that is not 2xx. */
export async function send(path: string, body?: unknown, abort?: AbortSignal): Promise<Response> {
  const headers: Record<string, string> = {};
  const sent = (path.startsWith("console/api/") && adminKey.value) || key.value;
  if (sent) headers["authorization"] = `Bearer ${sent}`;
  if (body !== undefined) headers["content-type"] = "application/json";
  const response = await fetch(new URL(path, document.baseURI), {
    method: body === undefined ? "GET" : "POST",
    headers,
    body: body === undefined ? undefined : JSON.stringify(body),
    signal: abort ?? null,
    cache: "no-store",
  });
  if (response.ok) {
    keyProblem.value = "";
    return response;
  }
  const message = errorMessage(await response.text()) || `${response.status} ${response.statusText}`;
  if (response.status === 401) keyProblem.value = message;
  throw new ServerError(response.status, message);
}

export async function getJson<T>(path: string): Promise<T> {
  return (await send(path)).json() as Promise<T>;
}

/** The message of an error response of any protocol: {"error": "..."}, {"error": {"message": "..."}}, or text. */
function errorMessage(text: string): string {
  try {
    const error = JSON.parse(text).error;
    return typeof error === "string" ? error : String(error.message);
  } catch {
    return text;
  }
}

/** The data of each server-sent event of a response, until "[DONE]" or the end. */
export async function* events(response: Response): AsyncGenerator<any> {
  const reader = response.body!.pipeThrough(new TextDecoderStream()).getReader();
  let text = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    text += value;
    let end: number;
    while ((end = text.indexOf("\n\n")) >= 0) {
      const data = text.slice(0, end).replace(/^data: ?/gm, "");
      text = text.slice(end + 2);
      if (data === "[DONE]") return;
      yield JSON.parse(data);
    }
  }
}
