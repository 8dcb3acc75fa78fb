"""Adds the ceilings of the machine to the record of every run of the microbenchmarks."""

from __future__ import annotations

from typing import Any

from bench.harness.ceilings import ceilings


def pytest_benchmark_update_machine_info(config: Any, machine_info: dict[str, Any]) -> None:  # noqa: ARG001
    machine_info["ceilings"] = ceilings()
