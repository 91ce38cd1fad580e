"""`stoker export slurm`: the scripts of a Slurm job that serves an engine."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from stoker.cli.engines import Model, prepare_engine
from stoker.cli.options import struct_options
from stoker.deploy.slurm.export import SlurmJob, export_slurm

JOB_HELP = {
    "nodes": "Number of hosts. Default: one for each pipeline stage of the engine.",
    "job_name": "Name of the job.",
    "partition": "Partition of the job. Default: that of the cluster.",
    "account": "Account of the job. Default: that of the user.",
    "time": "Time limit of the job, such as 1-00:00:00. Default: that of the partition.",
    "gpus_per_node": "GPUs of each host: a number or TYPE:NUMBER, such as h100:4. Default: one per rank.",
    "cpus_per_node": "CPUs of each host. Default: 4, and 4 for each rank.",
    "container_image": "Image for Slurm's container plugin (pyxis). Default: the hosts have Stoker installed.",
    "container_mounts": "Mounts of the container, such as /data:/data. The engine and the folder must be among them.",
    "container_workdir": "Working directory in the container.",
    "command": "The stoker program on the hosts or in the container.",
    "host": "Address on which node 0 listens.",
    "port": "HTTP port of node 0.",
    "drain_timeout_s": "Seconds that requests in flight may take after scancel; less than Slurm's KillWait.",
    "serve_options": "Further options of stoker serve, such as '--api-keys /etc/keys --grpc-port 8001'.",
}


@struct_options(SlurmJob, "job", JOB_HELP)
def slurm(
    model: Model,
    folder: Annotated[Path, typer.Argument(help="The folder to write, which all hosts of the job can read.")],
    *,
    job: SlurmJob,
) -> None:
    """Write stoker.sub for sbatch, and stoker.sh, which runs on each host of the job. Logs are written to the folder's logs.

    All hosts must find the engine under the same path. Node 0, the first host, serves. Submit the job with: sbatch FOLDER/stoker.sub

    Examples:

      stoker export slurm engine job

      stoker export slurm engine job --nodes 2 --partition luna --time 8:00:00
    """
    from stoker.cli.job_options import check_serve_options
    from stoker.cli.prepare_server import engine_info

    engine = engine_info(prepare_engine(model, None))
    check_serve_options(job.serve_options, engine)
    for file in export_slurm(engine, folder, job):
        typer.echo(file)
