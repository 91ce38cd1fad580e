// Drawing in the colours of the theme, at the resolution of the screen.
import { useEffect, useRef } from "preact/hooks";

export type Colours = (name: string) => string;

/** A canvas that `draw` fills after each rendering and each change of its size; sizes are in CSS pixels. */
export function useCanvas(draw: (context: CanvasRenderingContext2D, width: number, height: number, colours: Colours) => void) {
  const ref = useRef<HTMLCanvasElement>(null);
  const paint = () => {
    const canvas = ref.current;
    if (!canvas || !canvas.clientWidth) return;
    const scale = devicePixelRatio || 1;
    const { clientWidth: width, clientHeight: height } = canvas;
    canvas.width = Math.round(width * scale);
    canvas.height = Math.round(height * scale);
    const context = canvas.getContext("2d")!;
    context.scale(scale, scale);
    const style = getComputedStyle(canvas);
    draw(context, width, height, (name) => style.getPropertyValue(`--${name}`).trim());
  };
  useEffect(paint);
  useEffect(() => {
    const observer = new ResizeObserver(paint);
    if (ref.current) observer.observe(ref.current);
    return () => observer.disconnect();
  }, []);
  return ref;
}
