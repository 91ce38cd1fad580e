import { render } from "preact";
import { useEffect, useState } from "preact/hooks";
import { adminKey, key, keyProblem, setKeys } from "./api";
import { ChatView } from "./chat/ChatView";
import { LiveView } from "./live/LiveView";
import { Timeline } from "./live/Timeline";
import { LogView } from "./LogView";
import { ModelsView } from "./ModelsView";
import { ThemeButton } from "./theme";

const VIEWS = [
  { id: "chat", title: "Chat", view: ChatView },
  { id: "live", title: "Live", view: LiveView },
  { id: "timeline", title: "Timeline", view: Timeline },
  { id: "models", title: "Models", view: ModelsView },
  { id: "log", title: "Log", view: LogView },
];

function viewOfHash(): number {
  return Math.max(0, VIEWS.findIndex((view) => `#${view.id}` === location.hash));
}

/** The tabs. Arrow keys, Home and End move between them, as in the ARIA pattern. */
function App() {
  const [current, setCurrent] = useState(viewOfHash());
  const [editsKey, setEditsKey] = useState(false);
  useEffect(() => {
    const change = () => setCurrent(viewOfHash());
    addEventListener("hashchange", change);
    return () => removeEventListener("hashchange", change);
  }, []);
  const move = (event: KeyboardEvent) => {
    const last = VIEWS.length - 1;
    const target = { ArrowRight: current === last ? 0 : current + 1, ArrowLeft: current === 0 ? last : current - 1, Home: 0, End: last }[event.key];
    if (target === undefined) return;
    event.preventDefault();
    location.hash = VIEWS[target]!.id;
    document.getElementById(`tab-${VIEWS[target]!.id}`)?.focus();
  };
  const showsKey = editsKey || keyProblem.value !== "";
  return (
    <>
      <header>
        <h1>Stoker</h1>
        <div role="tablist" aria-label="Views" onKeyDown={move}>
          {VIEWS.map((view, index) => (
            <button
              key={view.id}
              id={`tab-${view.id}`}
              role="tab"
              type="button"
              aria-selected={index === current}
              aria-controls={`panel-${view.id}`}
              tabIndex={index === current ? 0 : -1}
              onClick={() => (location.hash = view.id)}
            >
              {view.title}
            </button>
          ))}
        </div>
        <button type="button" class="quiet" aria-expanded={showsKey} onClick={() => setEditsKey(!editsKey)}>
          API key{key.value || adminKey.value ? " ✓" : ""}
        </button>
        <ThemeButton />
      </header>
      {showsKey && <KeyForm onDone={() => setEditsKey(false)} />}
      <main>
        {VIEWS.map((view, index) => (
          <section key={view.id} id={`panel-${view.id}`} role="tabpanel" aria-labelledby={`tab-${view.id}`} hidden={index !== current}>
            <view.view visible={index === current} />
          </section>
        ))}
      </main>
      <footer>
        <a href="docs">Routes</a> <a href="openapi.json">OpenAPI</a>
      </footer>
    </>
  );
}

function KeyForm({ onDone }: { onDone: () => void }) {
  const [value, setValue] = useState(key.value);
  const [admin, setAdmin] = useState(adminKey.value);
  const save = (event: Event) => {
    event.preventDefault();
    setKeys(value, admin);
    onDone();
  };
  return (
    <form class="key-form" onSubmit={save}>
      {keyProblem.value && <p role="alert">{keyProblem.value}</p>}
      <label for="api-key">API key</label>
      <input id="api-key" type="password" autocomplete="off" value={value} onInput={(event) => setValue(event.currentTarget.value)} />
      <label for="admin-key">Admin key</label>
      <input id="admin-key" type="password" autocomplete="off" value={admin} onInput={(event) => setAdmin(event.currentTarget.value)} />
      <button type="submit">Use these keys</button>
      <p class="hint">The admin key is for all views but the chat, if the server has one. Keys are stored until this browser tab is closed.</p>
    </form>
  );
}

render(<App />, document.getElementById("app")!);
