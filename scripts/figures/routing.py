"""The router: what a decision is made from, and how block events keep its index up to date."""

from __future__ import annotations

from svg import Drawing


def routing() -> Drawing:
    d = Drawing(
        "Routing by prefix",
        "A router tokenizes a request as its replicas do, compares block hashes with those that replicas have reported, and forwards it.",
        980,
        430,
    )
    d.heading()
    d.box(24, 84, 150, 70, "grey", "Client", "HTTP, SSE, gRPC;", "any protocol")
    d.box(230, 76, 330, 236, "blue", "stoker route")
    d.box(246, 112, 142, 84, "blue", "1  Tokens", "protocol, template,", "tokenizer", "→ block hashes")
    d.box(402, 112, 142, 84, "blue", "2  Choice", "load + tokens that", "are not cached", "− bonuses")
    d.box(246, 212, 142, 84, "blue", "4  Failure", "nothing sent yet:", "repeat elsewhere;", "else an error event")
    d.box(402, 212, 142, 84, "amber", "Block index", "hash → replicas", "from events, and", "from recent choices")
    d.line((174, 120), (244, 120), arrow=True)
    d.line((388, 154), (400, 154), arrow=True)
    d.line((473, 210), (473, 198), arrow=True)
    for i, held in enumerate(("A B C", "A B", "X Y")):
        y = 76 + i * 84
        d.box(730, y, 226, 68, "green", f"Replica {i + 1}", f"prefix index: {held}", "stoker serve --kv-events")
    d.line((544, 140), (728, 108), arrow=True)
    d.text(580, 112, "3  request", "small soft")
    d.line((728, 130), (640, 130), (640, 262), (546, 262), arrow=True, colour="strong-amber")
    d.line((728, 206), (640, 206), colour="strong-amber")
    d.line((728, 284), (640, 284), (640, 262), colour="strong-amber")
    d.text(582, 240, "block", "small soft")
    d.text(582, 255, "events", "small soft")
    d.box(230, 342, 330, 62, "grey", "Another router", "subscribes to the same events;", "no database, no common state")
    d.line((728, 300), (700, 300), (700, 374), (562, 374), arrow=True, colour="strong-amber")
    d.text(24, 190, "prompt  A B C D", "small soft")
    d.text(24, 208, "→ replica 1: D is computed", "small soft")
    return d
