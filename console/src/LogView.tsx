// The newest lines of the log, with a filter.
import { useEffect, useRef, useState } from "preact/hooks";
import { adminKey, getJson, key } from "./api";

const INTERVAL_MS = 2000;
const MAX_LINES = 2000;
const LEVELS = ["DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL"];

interface Line {
  time_s: number;
  level: string;
  logger: string;
  text: string;
  pid: number;
  process: string;
}

export function LogView({ visible }: { visible: boolean }) {
  const [lines, setLines] = useState<Line[]>([]);
  const [level, setLevel] = useState("DEBUG");
  const [filter, setFilter] = useState("");
  const [problem, setProblem] = useState("");
  const [follows, setFollows] = useState(true);
  const box = useRef<HTMLDivElement>(null);
  useEffect(() => {
    if (!visible) return;
    let timer = 0;
    let active = true;
    let after = 0;
    let known: Line[] = [];
    const poll = async () => {
      try {
        const answer = await getJson<{ lines: Line[] }>(`console/api/log?after=${after}`);
        known = [...known, ...answer.lines].slice(-MAX_LINES);
        after = known[known.length - 1]?.time_s ?? 0;
        if (active) setLines(known);
        setProblem("");
      } catch (error) {
        setProblem((error as Error).message);
      }
      if (active) timer = window.setTimeout(poll, INTERVAL_MS);
    };
    void poll();
    return () => {
      active = false;
      clearTimeout(timer);
    };
  }, [visible, key.value, adminKey.value]);
  useEffect(() => {
    if (follows && box.current) box.current.scrollTop = box.current.scrollHeight;
  }, [lines, follows, level, filter]);
  const lowest = LEVELS.indexOf(level);
  const shown = lines.filter((line) => LEVELS.indexOf(line.level) >= lowest && `${line.logger} ${line.text}`.toLowerCase().includes(filter.toLowerCase()));
  return (
    <>
      <div class="toolbar">
        <label>
          Level{" "}
          <select value={level} onChange={(event) => setLevel(event.currentTarget.value)}>
            {LEVELS.map((each) => (
              <option key={each}>{each}</option>
            ))}
          </select>
        </label>
        <label>
          Filter <input type="search" value={filter} onInput={(event) => setFilter(event.currentTarget.value)} />
        </label>
        <label class="check">
          <input type="checkbox" checked={follows} onChange={(event) => setFollows(event.currentTarget.checked)} /> Follow
        </label>
        <span role="status" class={problem ? "problem" : "hint"}>
          {problem || `${shown.length} of ${lines.length} lines`}
        </span>
      </div>
      <div class="log" ref={box} role="log" aria-label="Log" tabIndex={0}>
        {shown.map((line, index) => (
          <div key={index} class={`line ${line.level}`}>
            <time>{new Date(line.time_s * 1000).toTimeString().slice(0, 8)}</time> <b>{line.level}</b>{" "}
            <span class="hint">
              {line.process} {line.logger}
            </span>{" "}
            {line.text}
          </div>
        ))}
      </div>
    </>
  );
}
