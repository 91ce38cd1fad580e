"""The fused layer kernel: copies of weights run ahead of the products, across linears and grid barriers."""

from __future__ import annotations

from svg import Drawing

# (start, end) in µs on the time axis, of the copies and of the products of a linear. Proportions as in one AWQ layer of Llama-3.1-8B.
LINEARS = (
    ("out_proj", "blue", (0.0, 4.6), (2.6, 5.6)),
    ("gate + up", "amber", (4.6, 19.8), (9.2, 21.0)),
    ("down", "rose", (19.8, 27.6), (24.0, 29.2)),
    ("next qkv", "green", (27.6, 31.6), (32.2, 34.8)),
)
BARRIERS = (6.9, 22.2, 30.4)
QUANTIZE = ((1.4, 2.5), (7.6, 9.1), (22.7, 23.9), (31.0, 32.1))
SCALE = 23.0
LEFT = 150.0


def fused_layer() -> Drawing:
    d = Drawing(
        "The fused layer kernel",
        "One launch computes the four linears between two attentions. Copies of weights continue while CTAs wait at grid barriers.",
        980,
        470,
    )
    d.heading("one launch for the four linears between two attentions; one CTA per SM, all resident")

    for number, delay in enumerate((0.0, 0.5, 0.2)):
        _cta(d, 66 + 92 * number, f"CTA {number}" if number < 2 else "CTA 131", delay)
    for barrier in BARRIERS:
        x = LEFT + SCALE * (barrier + 0.35)
        d.line((x, 58), (x, 336), colour="strong-rose", width=2, dash="6 4")
    d.text(LEFT + SCALE * (BARRIERS[0] + 0.35), 352, "grid barrier", "small middle")
    d.text(LEFT + SCALE * (BARRIERS[1] + 0.35), 352, "grid barrier", "small middle")
    d.text(LEFT + SCALE * (BARRIERS[2] + 0.35), 352, "grid barrier", "small middle")
    wait = LEFT + SCALE * 1.2
    d.line((wait, 58), (wait, 336), colour="strong-blue", width=2, dash="2 3")
    d.text(24, 352, "PDL wait: attention has finished", "small")

    d.text(24, 394, "Pipeline", "bold")
    d.text(24, 411, "shared memory", "small soft")
    stages = ("multiply", "arrived", "arrived", "in flight", "in flight", "in flight")
    for number, state in enumerate(stages):
        x = LEFT + 104 * number
        d.rect(x, 376, 96, 44, {"multiply": "amber", "arrived": "green", "in flight": "grey"}[state])
        d.text(x + 48, 394, f"stage {number}", "small middle bold")
        d.text(x + 48, 411, state, "small middle")
    d.text(LEFT + 104 * 6 + 6, 394, "each warp fills its own stages", "small")
    d.text(LEFT + 104 * 6 + 6, 411, "with cp.async, in schedule order", "small")
    d.text(
        24,
        450,
        "Weights depend on nothing, so their copies pass linear and barrier boundaries: memory stays busy while activations are quantized.",
        "small",
    )
    return d


def _cta(d: Drawing, y: float, name: str, delay: float) -> None:
    d.text(24, y + 16, name, "bold")
    d.text(142, y + 16, "copies", "small soft end")
    d.text(142, y + 44, "compute", "small soft end")
    for label, colour, copies, products in LINEARS:
        x0, x1 = (LEFT + SCALE * t for t in copies)
        d.rect(x0, y, x1 - x0 - 2, 22, colour, radius=3)
        d.text((x0 + x1) / 2, y + 15.5, label, "small middle")
        x0 = LEFT + SCALE * (products[0] + delay * 0.3)
        x1 = LEFT + SCALE * (products[1] + delay)
        d.rect(x0, y + 28, x1 - x0, 22, colour, radius=3)
        d.text((x0 + x1) / 2, y + 43.5, "products", "small middle")
    for start, end in QUANTIZE:
        d.rect(LEFT + SCALE * start, y + 28, SCALE * (end - start), 22, "grey", radius=3)
        d.text(LEFT + SCALE * (start + end) / 2, y + 43.5, "q", "small middle")
