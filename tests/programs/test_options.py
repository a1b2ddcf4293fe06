"""What can't be measured is refused in a line, before anything is started."""

import click
import pytest
from click.testing import CliRunner

from tests.programs.live import compare_policies, control_cost, fidelity, gossip_live, many_replicas
from tests.programs.live.versus import __main__ as versus
from tests.programs.studies import decide, scale

EMPTY = "/dev/null"


@pytest.mark.parametrize(
    ("command", "arguments", "why"),
    [
        (decide.main, "--replicas 0", "0 is not in the range"),
        (decide.main, "--policy nope", "'--policy'"),
        (scale.main, "--policy nope", "'--policy'"),
        (compare_policies.main, f"--policy nope --trace {__file__}", "'--policy'"),
        (compare_policies.main, f"--trace {EMPTY}", "holds no request"),
        (fidelity.main, f"--trace {EMPTY}", "holds no request"),
        (fidelity.main, f"--policy nope --trace {__file__}", "'--policy'"),
        (gossip_live.main, f"--trace {EMPTY}", "holds no request"),
        (versus.main, f"--trace {EMPTY}", "holds no request"),
        (versus.main, "--only mesh,nginx", "use mesh, sglang-router, vllm-router"),
        (versus.main, "--rounds 0", "0 is not in the range"),
        (many_replicas.main, "--each-per-s 0", "0.0 is not in the range"),
        (control_cost.main, "--replicas 10", "two numbers or more"),
        (control_cost.main, "--replicas 10 --replicas 10", "two numbers or more"),
    ],
)
def test_it_is_a_usage_error(command: click.Command, arguments: str, why: str) -> None:
    result = CliRunner().invoke(command, arguments.split())
    assert result.exit_code == 2, result.output
    assert why in result.output and "Error: Invalid value for" in result.output
