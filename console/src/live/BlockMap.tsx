// The blocks of one tier of the KV cache as a map: each cell is one block, or several neighbouring blocks.
import { count, percent } from "../format";
import { useCanvas } from "./canvas";
import type { Tier } from "./data";

const SIZE = 10; // pixels of a cell
const KINDS = ["used", "shared", "cached", "empty"] as const;

function total(values: number[]): number {
  return values.reduce((sum, value) => sum + value, 0);
}

export function BlockMap({ tier, tokensPerBlock }: { tier: Tier; tokensPerBlock: number }) {
  const numCells = tier.used.length;
  const canvas = useCanvas((context, width, _, colours) => {
    const columns = Math.max(1, Math.floor(width / SIZE));
    for (let cell = 0; cell < numCells; cell += 1) {
      const left = (cell % columns) * SIZE;
      const top = Math.floor(cell / columns) * SIZE;
      const size = Math.min(tier.blocks_per_cell, tier.num_blocks - cell * tier.blocks_per_cell);
      const shared = tier.shared[cell]!;
      // From the bottom: shared, used by one sequence, cached, empty.
      const parts: [string, number][] = [
        ["shared", shared],
        ["used", tier.used[cell]! - shared],
        ["cached", tier.cached[cell]!],
      ];
      context.fillStyle = colours("empty");
      context.fillRect(left, top, SIZE - 1, SIZE - 1);
      let bottom = top + SIZE - 1;
      for (const [kind, blocks] of parts) {
        const height = ((SIZE - 1) * blocks) / size;
        context.fillStyle = colours(kind);
        context.fillRect(left, bottom - height, SIZE - 1, height);
        bottom -= height;
      }
    }
  });
  const shared = total(tier.shared);
  const used = total(tier.used);
  const cached = total(tier.cached);
  const blocks = { used: used - shared, shared, cached, empty: tier.num_blocks - used - cached };
  const title = `${tier.name}: ${count(tier.num_blocks)} blocks of ${tokensPerBlock} tokens`;
  const summary = KINDS.map((kind) => `${count(blocks[kind])} ${kind}`).join(", ");
  return (
    <figure class="block-map">
      <figcaption>
        {title}
        {tier.blocks_per_cell > 1 && `, ${tier.blocks_per_cell} in a cell`}
      </figcaption>
      <canvas ref={canvas} role="img" aria-label={`${title}: ${summary}`} style={{ height: `${mapHeight(numCells)}px` }} />
      <ul class="legend">
        {KINDS.map((kind) => (
          <li key={kind}>
            <span class={`swatch ${kind}`} /> {kind === "used" ? "used by one sequence" : kind}: {count(blocks[kind])} ({percent(blocks[kind] / tier.num_blocks)})
          </li>
        ))}
      </ul>
    </figure>
  );
}

/** The height for the narrowest screens; wider ones leave some of it empty. */
function mapHeight(numCells: number): number {
  const columns = Math.max(1, Math.floor(Math.min(document.documentElement.clientWidth - 40, 1160) / SIZE));
  return Math.ceil(numCells / columns) * SIZE;
}
