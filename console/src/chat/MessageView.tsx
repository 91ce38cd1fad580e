import { useState } from "preact/hooks";
import type { Message, ToolCall } from "./conversation";
import { Tokens } from "./Tokens";

const NAMES = { user: "You", assistant: "Model", tool: "Tool result" };

interface Actions {
  onEdit: (text: string) => void;
  onRegenerate: () => void;
  onToolResult: (call: ToolCall, text: string) => void;
}

export function MessageView({ message, busy, answered, ...actions }: { message: Message; busy: boolean; answered: (call: ToolCall) => boolean } & Actions) {
  const [edits, setEdits] = useState(false);
  return (
    <article class={`message ${message.role}${message.failed ? " failed" : ""}`} aria-label={NAMES[message.role]}>
      <h2>{NAMES[message.role]}</h2>
      {message.reasoning && (
        <details>
          <summary>Reasoning</summary>
          <div class="text">{message.reasoning}</div>
        </details>
      )}
      {edits ? (
        <Editor text={message.content} onCancel={() => setEdits(false)} onSave={(text) => (setEdits(false), actions.onEdit(text))} />
      ) : message.tokens?.length ? (
        <Tokens tokens={message.tokens} />
      ) : (
        <Text text={message.content} />
      )}
      {message.calls?.map((call) => (
        <ToolCallView key={call.id} call={call} answered={busy || answered(call)} onResult={(text) => actions.onToolResult(call, text)} />
      ))}
      {message.note && (
        <p class="note" role={message.failed ? "alert" : undefined}>
          {message.note}
        </p>
      )}
      {!busy && !edits && (
        <div class="actions">
          {message.role === "user" && (
            <button type="button" class="quiet" onClick={() => setEdits(true)}>
              Edit
            </button>
          )}
          {message.role === "assistant" && (
            <>
              <button type="button" class="quiet" onClick={actions.onRegenerate}>
                Regenerate
              </button>
              <button type="button" class="quiet" onClick={() => void navigator.clipboard?.writeText(message.content)}>
                Copy
              </button>
            </>
          )}
        </div>
      )}
    </article>
  );
}

/** Text with fenced code blocks. */
function Text({ text }: { text: string }) {
  const parts = text.split(/^```[^\n]*\n?/m);
  return (
    <>
      {parts.map((part, index) =>
        index % 2 ? (
          <pre key={index} tabIndex={0}>
            <code>{part}</code>
          </pre>
        ) : (
          part && (
            <div key={index} class="text">
              {part}
            </div>
          )
        ),
      )}
    </>
  );
}

function Editor({ text, onSave, onCancel }: { text: string; onSave: (text: string) => void; onCancel: () => void }) {
  const [value, setValue] = useState(text);
  return (
    <form
      onSubmit={(event) => {
        event.preventDefault();
        onSave(value);
      }}
    >
      <textarea aria-label="Edited message" rows={3} value={value} onInput={(event) => setValue(event.currentTarget.value)} autofocus />
      <button type="submit">Send again</button>
      <button type="button" class="quiet" onClick={onCancel}>
        Cancel
      </button>
    </form>
  );
}

function ToolCallView({ call, answered, onResult }: { call: ToolCall; answered: boolean; onResult: (text: string) => void }) {
  const [value, setValue] = useState("");
  return (
    <div class="tool-call">
      <p>
        calls <code>{call.name}</code>
      </p>
      <pre tabIndex={0}>
        <code>{call.arguments}</code>
      </pre>
      {!answered && (
        <form
          onSubmit={(event) => {
            event.preventDefault();
            onResult(value);
          }}
        >
          <label>
            Result of {call.name}
            <textarea rows={2} class="code" value={value} onInput={(event) => setValue(event.currentTarget.value)} />
          </label>
          <button type="submit">Send the result</button>
        </form>
      )}
    </div>
  );
}
