"""The Ray Serve application: requests go past Ray to the servers, and reports of the servers decide the number of replicas."""

from __future__ import annotations

from svg import Drawing


def ray_application() -> Drawing:
    d = Drawing(
        "An application of Ray Serve",
        "The ingress contains the router and sends requests directly to the servers of the replicas. Each replica is one placement group, "
        "on one host or on several. Replicas report their load to the controller, which starts and ends replicas by Stoker's policy.",
        980,
        520,
    )
    d.heading("stoker serve --ray")

    d.box(24, 152, 118, 68, "grey", "Clients", "HTTP, SSE, gRPC;", "any protocol")
    d.box(176, 152, 124, 68, "grey", "Proxy", "HAProxy, or that", "of Ray Serve")
    d.line((142, 186), (174, 186), arrow=True)

    d.box(334, 62, 224, 250, "blue", "Deployment ingress")
    d.text(345, 102, "the router of stoker route", "small")
    d.box(350, 118, 192, 52, "blue", "Choice", "cached prefix, load, sessions")
    d.box(350, 180, 192, 52, "blue", "Queue", "requests without a replica")
    d.box(350, 242, 192, 52, "amber", "Block index", "which replica holds a prefix")
    d.line((300, 186), (332, 186), arrow=True)

    d.rect(660, 62, 296, 138, "paper", outline="grid")
    d.text(672, 83, "Deployment engine-one", "bold")
    for index in (0, 1):
        x = 672 + 140 * index
        d.rect(x, 94, 132, 94, "green", outline="strong-green")
        d.text(x + 10, 114, f"Replica {index + 1}", "bold")
        d.text(x + 10, 133, "stoker serve", "small")
        d.text(x + 10, 150, "placement group:", "small soft")
        d.text(x + 10, 166, "GPUs of one host", "small soft")

    d.rect(660, 216, 296, 154, "paper", outline="grid")
    d.text(672, 237, "Deployment engine-two, nodes: 2", "bold")
    d.rect(672, 248, 272, 110, "green", outline="strong-green")
    d.text(682, 268, "Replica 1", "bold")
    d.text(934, 268, "STRICT_SPREAD", "small soft end")
    d.box(682, 278, 122, 70, "paper", "Bundle 0", "host A: node 0,", "which serves")
    d.box(812, 278, 122, 70, "paper", "Bundle 1", "host B: node 1,", "further ranks")

    d.line((558, 132), (658, 132), arrow=True)
    d.text(608, 123, "requests", "small middle")
    d.line((558, 232), (609, 232), (609, 250), (658, 250), arrow=True)
    d.line((658, 180), (634, 180), (634, 268), (560, 268), colour="strong-amber", arrow=True)
    d.line((658, 290), (634, 290), (634, 268), colour="strong-amber")
    d.text(597, 284, "block", "small middle")
    d.text(597, 299, "events", "small middle")

    policy = ("Stoker's policy: the larger of", "sequences ÷ target_requests and", "KV usage ÷ target_kv_usage")
    d.box(334, 404, 224, 92, "rose", "Controller of Ray Serve", *policy)
    d.line((446, 312), (446, 402), colour="strong-rose", arrow=True)
    d.text(436, 350, "a request of an engine", "small end")
    d.text(436, 366, "without replicas", "small end")
    d.line((710, 370), (710, 428), (560, 428), colour="strong-rose", arrow=True)
    d.text(572, 403, "sequences, waiting", "small")
    d.text(572, 419, "requests, KV usage", "small")
    d.line((558, 466), (890, 466), (890, 372), arrow=True)
    d.text(572, 484, "starts, ends, replaces and updates replicas", "small")
    return d
