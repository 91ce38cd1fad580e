// The tokens of an answer, coloured by their probability. The mouse or the arrow keys select one, whose alternatives are shown.
import { useState } from "preact/hooks";
import { percent } from "../format";
import type { Token } from "./conversation";

const LEVELS = [0.9, 0.7, 0.4, 0.1]; // probabilities between the five colours

function level(token: Token): number {
  const probability = Math.exp(token.logprob);
  return LEVELS.filter((bound) => probability < bound).length;
}

export function Tokens({ tokens }: { tokens: Token[] }) {
  const [selected, setSelected] = useState<number | null>(null);
  const move = (event: KeyboardEvent) => {
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (event.key === "Escape") setSelected(null);
    if (step === undefined) return;
    event.preventDefault();
    setSelected(selected === null ? 0 : Math.min(tokens.length - 1, Math.max(0, selected + step)));
  };
  const hover = (event: MouseEvent) => {
    const index = (event.target as HTMLElement).dataset["index"];
    if (index !== undefined) setSelected(Number(index));
  };
  const token = selected === null ? undefined : tokens[selected];
  return (
    <>
      <div
        class="tokens"
        role="group"
        tabIndex={0}
        aria-label="Tokens with probabilities. The left and right arrow keys select a token."
        onKeyDown={move}
        onMouseOver={hover}
      >
        {tokens.map((each, index) => (
          <span key={index} data-index={index} class={`p${level(each)}${index === selected ? " selected" : ""}`}>
            {each.text}
          </span>
        ))}
      </div>
      <p class="token-detail" role="status">
        {token ? (
          <>
            <code>{JSON.stringify(token.text)}</code> {percent(Math.exp(token.logprob))}
            {token.top.map((each) => (
              <span key={each.text} class="alternative">
                <code>{JSON.stringify(each.text)}</code> {percent(Math.exp(each.logprob))}
              </span>
            ))}
          </>
        ) : (
          <span class="hint">Point at a token to see its probability and the alternatives.</span>
        )}
      </p>
    </>
  );
}
