import { useEffect, useState } from "preact/hooks";

const THEMES = ["system", "light", "dark"] as const;
const NAME = "stoker-theme";

/** Switches between the colours of the system, light and dark ones. */
export function ThemeButton() {
  const [theme, setTheme] = useState(localStorage.getItem(NAME) ?? "system");
  useEffect(() => {
    document.documentElement.dataset["theme"] = theme;
    localStorage.setItem(NAME, theme);
  }, [theme]);
  const next = THEMES[(THEMES.indexOf(theme as (typeof THEMES)[number]) + 1) % THEMES.length]!;
  return (
    <button type="button" class="quiet" onClick={() => setTheme(next)} aria-label={`Colours: ${theme}. Change to ${next}.`}>
      {{ system: "◐", light: "☀", dark: "☾" }[theme] ?? "◐"}
    </button>
  );
}
