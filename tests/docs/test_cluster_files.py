"""The job files of docs/running-on-clusters.md are valid, shown there, and leave enough time for the last step."""

from __future__ import annotations

import inspect
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

import jaxckpt

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/running-on-clusters.md").read_text()
SBATCH = ROOT / "examples/cluster_job.sbatch"
JOBSET = ROOT / "examples/cluster_job.yaml"
MARGIN_SECONDS = 10
"""Time in which the processes exit, as the page says."""


def preemption_seconds(text: str) -> int:
    (seconds,) = re.findall(r"--preemption-seconds=(\d+)", text)
    return int(seconds)


@pytest.fixture
def job() -> dict[str, Any]:
    """The only Job of the JobSet."""
    jobset = yaml.safe_load(JOBSET.read_text())
    assert (jobset["kind"], jobset["metadata"]["name"]) == ("JobSet", "train")
    (job,) = jobset["spec"]["replicatedJobs"]
    assert (job["name"], job["replicas"]) == ("workers", 1)
    return job["template"]["spec"]


@pytest.mark.child
def test_the_batch_file_is_valid_bash() -> None:
    subprocess.run(["bash", "-n", SBATCH], check=True)


def test_slurm_sends_the_signal_early_enough() -> None:
    (before_end,) = re.findall(r"#SBATCH --signal=TERM@(\d+)", SBATCH.read_text())
    assert preemption_seconds(SBATCH.read_text()) + MARGIN_SECONDS <= int(before_end)


def test_kubernetes_waits_long_enough(job: dict[str, Any]) -> None:
    grace_seconds = job["template"]["spec"]["terminationGracePeriodSeconds"]
    (container,) = job["template"]["spec"]["containers"]
    assert preemption_seconds(" ".join(container["command"])) + MARGIN_SECONDS <= grace_seconds


def test_the_lines_for_spot_nodes_are_valid_and_leave_time_too(job: dict[str, Any]) -> None:
    text = re.sub(r"# (nodeSelector|tolerations|  -|    (?:operator|value|effect))", r"\1", JOBSET.read_text())
    (workers,) = yaml.safe_load(text)["spec"]["replicatedJobs"]
    pod = workers["template"]["spec"]["template"]["spec"]
    (toleration,) = pod["tolerations"]
    assert pod["nodeSelector"] == {toleration["key"]: toleration["value"]}
    assert toleration["effect"] == "NoSchedule"
    ((grace_seconds, seconds),) = re.findall(r"Spot nodes: (\d+), and --preemption-seconds=(\d+)", text)
    assert int(seconds) + MARGIN_SECONDS <= int(grace_seconds)


def test_the_pods_find_each_other(job: dict[str, Any]) -> None:
    (container,) = job["template"]["spec"]["containers"]
    variables = {variable["name"]: variable["value"] for variable in container["env"]}
    assert variables["JAX_COORDINATOR_ADDRESS"].partition(":")[0] == "train-workers-0-0.train"
    assert int(variables["PROCESSES"]) == job["parallelism"] == job["completions"]
    program = (ROOT / "examples" / container["command"][1]).read_text()
    assert all(f'"{name}"' in program for name in [*variables, "JOB_COMPLETION_INDEX", "--preemption-seconds"])


def test_the_status_of_a_preemption_is_that_of_the_files(job: dict[str, Any]) -> None:
    status = jaxckpt.Preempted("").code
    assert f'"$status" -eq {status} ]' in SBATCH.read_text()
    rule = {"action": "FailJob", "onExitCodes": {"operator": "In", "values": [status]}}
    assert rule in job["podFailurePolicy"]["rules"]


def test_the_page_shows_the_files_and_the_default() -> None:
    shown = re.findall(r"```(?:bash|yaml)\n(.*?)```", PAGE, re.DOTALL)
    assert shown[0] == SBATCH.read_text()
    assert shown[1] in JOBSET.read_text()
    default = inspect.signature(jaxckpt.Checkpointer).parameters["preemption_seconds"].default
    assert f"`preemption_seconds` ({default:g} by default)" in PAGE
