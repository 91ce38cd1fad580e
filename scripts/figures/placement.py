"""The ranks of an engine on two hosts: pipeline stages across hosts, tensor-parallel ranks within."""

from __future__ import annotations

from svg import Drawing


def placement() -> Drawing:
    d = Drawing(
        "An engine on two hosts",
        "Node 0 has the last stage with the leader and serves; node 1 has the first stage. Step plans travel once per node over TCP, "
        "hidden states from stage to stage with NCCL.",
        980,
        420,
    )
    d.heading("--tensor-parallel 4 --pipeline-parallel 2, --nnodes 2")

    d.rect(24, 56, 452, 340, "paper", outline="grid")
    d.text(40, 80, "node 0, gpu01", "bold")
    d.box(40, 94, 132, 62, "grey", "Frontends", "HTTP, gRPC, text")
    d.box(216, 94, 244, 62, "green", "Executor (leader)", "schedule, sampling, grammars")
    d.line((172, 125), (214, 125), arrow=True)

    d.rect(504, 56, 452, 340, "paper", outline="grid")
    d.text(520, 80, "node 1, gpu02", "bold")
    d.box(520, 94, 420, 62, "grey", "Node process", "joins at --rendezvous; passes plans on; watches its ranks")
    d.line((460, 125), (518, 125), colour="strong-amber", width=2, arrow=True)
    d.text(489, 112, "TCP", "small middle")

    for node, (stage, first) in enumerate((("stage 1: layers 40 to 79, output head", 4), ("stage 0: embedding, layers 0 to 39", 0))):
        left = 40 + 480 * node
        d.rect(left, 214, 420, 164, "blue", outline="")
        d.text(left + 12, 236, stage, "bold")
        for index in range(4):
            x = left + 12 + 101 * index
            colour, role = ("green", "leader") if first + index == 4 else ("paper", "follower")
            d.box(x, 248, 92, 74, colour, f"rank {first + index}", f"cuda:{index}", role)
        d.line((left + 12, 346), (left + 408, 346), colour="strong-green", width=2)
        d.text(left + 210, 366, "all-reduce twice per layer, over NVLink", "small middle")
        d.line((left + 210, 156), (left + 210, 212), colour="strong-amber", width=2, arrow=True)
        d.text(left + 220, 190, "plans in shared memory", "small")
    d.line((520, 285), (464, 285), colour="strong-blue", width=2, arrow=True)
    d.text(490, 272, "NCCL", "small middle")
    return d
