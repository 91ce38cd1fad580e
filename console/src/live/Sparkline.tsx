/** A line of values from the oldest to the newest, from 0 to their maximum. */
export function Sparkline({ values, label }: { values: number[]; label: string }) {
  const top = Math.max(...values, 1e-9);
  const points = values.map((value, index) => `${(index / Math.max(values.length - 1, 1)) * 120},${30 - (value / top) * 28}`);
  const now = values.length ? Math.round(values[values.length - 1]!) : 0;
  return (
    <svg class="sparkline" viewBox="0 0 120 31" preserveAspectRatio="none" role="img" aria-label={`${label}: now ${now}, at most ${Math.round(top)}`}>
      <polyline points={points.join(" ")} />
    </svg>
  );
}
