// The models with their states, the engine card and the memory budget.
import { useEffect, useState } from "preact/hooks";
import { adminKey, getJson, key, send, type ServerError } from "./api";
import { EngineCard } from "./EngineCard";
import { count } from "./format";
import { live, useLive } from "./live/data";

interface Server {
  version: string;
  model_control: string;
  drain_timeout_s: number;
}

interface Row {
  name: string;
  version: string;
  state: string;
  reason?: string;
}

export function ModelsView({ visible }: { visible: boolean }) {
  useLive(visible, "counters");
  const [server, setServer] = useState<Server | null>(null);
  const [rows, setRows] = useState<Row[] | null>(null); // of the model repository; null: this server has none
  const [working, setWorking] = useState<Record<string, string>>({}); // model → what is being done
  const [message, setMessage] = useState("");

  const refresh = async () => {
    try {
      setServer(await getJson<Server>("console/api/server"));
      setRows(await (await send("v2/repository/index", {})).json());
    } catch (error) {
      setRows(null);
      if ((error as ServerError).status !== 404) setMessage((error as Error).message);
    }
  };
  // The live state changes every second while the view is visible.
  useEffect(() => {
    if (visible) void refresh();
  }, [visible, key.value, adminKey.value, live.value]);

  const control = async (name: string, action: "load" | "unload") => {
    setWorking((now) => ({ ...now, [name]: action === "load" ? "loading" : "finishing its requests" }));
    setMessage("");
    try {
      await send(`v2/repository/models/${encodeURIComponent(name)}/${action}`, {});
      setMessage(`${name}: ${action} was successful.`);
    } catch (error) {
      setMessage((error as Error).message);
    }
    setWorking(({ [name]: _, ...others }) => others);
    await refresh();
  };

  const explicit = server?.model_control === "explicit";
  const running = live.value?.state?.stats["num_running"];
  return (
    <>
      <h2>Models</h2>
      {server && !explicit && (
        <p class="hint">
          Clients cannot load and unload models of this server. With <code>stoker tritonserver --model-control-mode explicit --console</code> they can.
        </p>
      )}
      <div class="scroll" tabIndex={0} role="region" aria-label="Models">
        <table>
          <thead>
            <tr>
              <th scope="col">Model</th>
              <th scope="col">Version</th>
              <th scope="col">State</th>
              {explicit && <th scope="col">Action</th>}
            </tr>
          </thead>
          <tbody>
            {(rows ?? live.value?.models ?? []).map((row) => (
              <tr key={row.name}>
                <th scope="row">{row.name}</th>
                <td>{row.version}</td>
                <td>
                  <span class={`state ${row.state.toLowerCase()}`}>{row.state.toLowerCase()}</span> {row.reason !== row.state.toLowerCase() && row.reason}
                  {working[row.name] && (
                    <>
                      {working[row.name] !== "loading" && running !== undefined && `: ${count(running)} sequences are running`}{" "}
                      <progress aria-label={`${row.name}: ${working[row.name]}`} />
                    </>
                  )}
                </td>
                {explicit && (
                  <td>
                    <button type="button" disabled={row.name in working || row.state === "READY"} onClick={() => void control(row.name, "load")}>
                      Load
                    </button>{" "}
                    <button type="button" disabled={row.name in working || row.state !== "READY"} onClick={() => void control(row.name, "unload")}>
                      Drain and unload
                    </button>
                  </td>
                )}
              </tr>
            ))}
          </tbody>
        </table>
      </div>
      <p role="status">{message}</p>
      <EngineCard visible={visible} ready={live.value?.state != null} />
      {server && <p class="hint">Stoker {server.version}. Requests in flight have {server.drain_timeout_s} s to end when a model is unloaded.</p>}
    </>
  );
}
