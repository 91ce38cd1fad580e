// Numbers as text.
export function count(value: number): string {
  return Math.round(value).toLocaleString("en-US");
}

export function bytes(value: number): string {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let unit = 0;
  while (value >= 1024 && unit < units.length - 1) {
    value /= 1024;
    unit += 1;
  }
  return `${unit && value < 100 ? value.toFixed(1) : Math.round(value)} ${units[unit]}`;
}

/** "1 row", "2 rows". */
export function plural(value: number, noun: string): string {
  return `${count(value)} ${noun}${value === 1 ? "" : "s"}`;
}

/** A duration in seconds, with three digits. */
export function duration(seconds: number): string {
  if (!Number.isFinite(seconds)) return "–";
  if (seconds < 1) return `${(seconds * 1000).toPrecision(3)} ms`;
  return seconds < 60 ? `${seconds.toPrecision(3)} s` : `${Math.floor(seconds / 60)} min ${Math.round(seconds % 60)} s`;
}

export function percent(fraction: number): string {
  if (!Number.isFinite(fraction)) return "–";
  const value = fraction * 100;
  return `${value === 0 || value >= 10 ? Math.round(value) : value.toPrecision(2)} %`;
}
