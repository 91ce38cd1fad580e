"""A Slurm job of an engine on two hosts: what sbatch, srun and the scripts start, and how the processes are connected."""

from __future__ import annotations

from svg import Drawing


def slurm_job() -> Drawing:
    d = Drawing(
        "A job of two hosts",
        "sbatch runs stoker.sub on the first host, whose srun starts stoker.sh once per host. Slurm's environment tells each process its "
        "node. Node 0 serves and has the leader; every node starts the ranks of its host.",
        980,
        472,
    )
    d.heading("stoker export slurm ENGINE job --nodes 2")

    d.box(24, 62, 192, 68, "grey", "sbatch job/stoker.sub", "waits for two hosts;", "scancel ends the job")
    variables = ("STOKER_RENDEZVOUS = this host and a port of the job id", "STOKER_CLUSTER_TOKEN = a new shared secret")
    d.box(270, 62, 410, 68, "amber", "stoker.sub, on the first host of the job", *variables)
    d.box(736, 62, 220, 68, "amber", "srun --mpi=none", "one task per host, with the", "options of the job")
    d.line((216, 96), (268, 96), arrow=True)
    d.line((680, 96), (734, 96), arrow=True)
    d.line((846, 130), (846, 162), (250, 162))
    for x in (250, 730):
        d.line((x, 162), (x, 186), arrow=True)

    for node in (0, 1):
        left = 24 + 480 * node
        d.rect(left, 188, 452, 244, "paper", outline="grid")
        d.text(left + 16, 211, "first host: task 0" if node == 0 else "second host: task 1", "bold")
        d.text(left + 436, 211, f"SLURM_PROCID={node} SLURM_NTASKS=2", "small soft end")
        d.rect(left + 16, 222, 420, 34, "amber")
        d.text(left + 27, 244, "stoker.sh → stoker serve ENGINE", "bold")
        d.line((left + 226, 256), (left + 226, 282), arrow=True)
    d.box(40, 284, 132, 68, "grey", "Frontends", "serve requests at", "the job's port")
    d.box(192, 284, 268, 68, "green", "Node 0: the leader", "schedule, sampling; it is the first", "rank of the last stage")
    d.box(
        520,
        284,
        420,
        68,
        "grey",
        "Node 1",
        "joins at the rendezvous, passes plans on to its ranks,",
        "and reports their failures to node 0",
    )
    d.line((172, 316), (190, 316), arrow=True)
    d.line((460, 316), (518, 316), colour="strong-amber", width=2, arrow=True)
    d.text(489, 303, "TCP", "small middle")
    for node, first in enumerate(("last stage", "first stage")):
        left = 40 + 480 * node
        d.rect(left, 372, 420, 44, "blue", outline="")
        d.text(left + 12, 399, f"ranks of the {first}, one process per GPU")
        d.line((left + 210, 352), (left + 210, 370), colour="strong-amber", width=2, arrow=True)
    d.line((520, 394), (464, 394), colour="strong-blue", width=2, arrow=True)
    d.text(490, 383, "NCCL", "small middle")
    d.text(
        24,
        456,
        "Leader mode of mpirun: the same processes; the environment names node and rendezvous. Orchestrator mode: one process on one host.",
        "small soft",
    )
    return d
