import { useEffect, useRef, useState } from "preact/hooks";
import { getJson, key } from "../api";
import { generate, type Message, requestBody, type ToolCall } from "./conversation";
import { MessageView } from "./MessageView";
import { settings, SettingsForm } from "./settings";

export function ChatView({ visible }: { visible: boolean }) {
  const [messages, setMessages] = useState<Message[]>([]);
  const [draft, setDraft] = useState("");
  const [abort, setAbort] = useState<AbortController | null>(null);
  const [problem, setProblem] = useState("");
  const models = useModels(visible, setProblem);
  const end = useRef<HTMLDivElement>(null);
  useEffect(() => end.current?.scrollIntoView({ block: "nearest" }), [messages]);

  /** Replaces the conversation, and streams an answer to it. */
  const answer = async (conversation: Message[]) => {
    setProblem("");
    setMessages(conversation);
    let body;
    try {
      const { model } = settings.value;
      body = requestBody(conversation, { ...settings.value, model: models.includes(model) ? model : "" });
    } catch (error) {
      setProblem(`A JSON parameter is invalid: ${(error as Error).message}`);
      return;
    }
    const controller = new AbortController();
    setAbort(controller);
    await generate(body, controller.signal, (message) => setMessages([...conversation, message]));
    setAbort(null);
  };

  const submit = () => {
    if (abort || !draft.trim()) return;
    setDraft("");
    void answer([...messages, { role: "user", content: draft }]);
  };
  /** Adds the result of a tool call, and requests an answer when each call of the message has a result. */
  const addResult = (index: number, call: ToolCall, text: string) => {
    const extended: Message[] = [...messages, { role: "tool", content: text, callId: call.id }];
    const answered = answeredCalls(extended.slice(index + 1));
    if (messages[index]!.calls!.every((each) => answered(each))) void answer(extended);
    else setMessages(extended);
  };

  return (
    <div class="chat">
      <div class="conversation">
        {/* A screen reader reads additions when the answer is complete. */}
        <div class="messages" role="log" aria-label="Conversation" aria-busy={abort !== null} tabIndex={0}>
          {messages.length === 0 && <p class="hint">Write a message. The parameters beside it apply to the next answer.</p>}
          {messages.map((message, index) => (
            <MessageView
              key={index}
              message={message}
              busy={abort !== null}
              answered={answeredCalls(messages.slice(index + 1))}
              onEdit={(text) => void answer([...messages.slice(0, index), { ...message, content: text }])}
              onRegenerate={() => void answer(messages.slice(0, index))}
              onToolResult={(call, text) => addResult(index, call, text)}
            />
          ))}
          <div ref={end} />
        </div>
        {problem && (
          <p class="problem" role="alert">
            {problem}
          </p>
        )}
        <form
          class="composer"
          onSubmit={(event) => {
            event.preventDefault();
            submit();
          }}
        >
          <label for="draft">Message</label>
          <textarea
            id="draft"
            rows={3}
            placeholder="Enter sends, Shift+Enter starts a new line"
            value={draft}
            onInput={(event) => setDraft(event.currentTarget.value)}
            onKeyDown={(event) => {
              if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
                event.preventDefault();
                submit();
              } else if (event.key === "Escape") abort?.abort();
            }}
          />
          <div class="buttons">
            {abort ? (
              <button type="button" onClick={() => abort.abort()}>
                Stop
              </button>
            ) : (
              <button type="submit" disabled={!draft.trim()}>
                Send
              </button>
            )}
            <button type="button" class="quiet" disabled={abort !== null || messages.length === 0} onClick={() => setMessages([])}>
              New conversation
            </button>
          </div>
        </form>
      </div>
      <details class="parameters" open={matchMedia("(min-width: 800px)").matches}>
        <summary>Parameters</summary>
        <SettingsForm models={models} />
      </details>
    </div>
  );
}

/** Whether a tool call has a result in the messages after it, or the conversation continued without one. */
function answeredCalls(later: Message[]): (call: ToolCall) => boolean {
  return (call) => later.some((message) => message.role !== "tool" || message.callId === call.id);
}

/** The names of the served models, requested when the view is shown or the key changes. */
function useModels(visible: boolean, onProblem: (text: string) => void): string[] {
  const [models, setModels] = useState<string[]>([]);
  useEffect(() => {
    if (!visible) return;
    getJson<{ data: { id: string }[] }>("v1/models").then(
      (list) => {
        setModels(list.data.map((model) => model.id));
        onProblem(list.data.length ? "" : "No model is loaded.");
      },
      (error: Error & { status?: number }) => {
        const missing = "Chat needs the protocol openai, which this server does not serve.";
        onProblem(error.status === 404 ? missing : error.status === 401 ? "" : error.message); // the form of the key shows a 401
      },
    );
  }, [visible, key.value]);
  return models;
}
