"""Fixtures shared by all tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch.distributed as dist
from hypothesis import HealthCheck, settings
from torch.testing._internal.distributed.fake_pg import FakeStore

from ranks import RankPools, clean_up


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--examples",
        type=int,
        metavar="N",
        help="random windows: draw N examples, others every time (default: always the same 500)",
    )


# A test that draws passes or fails for what is changed, not for what it happened to draw, nor
# for how busy the machine is. `pytest -m soak` draws others every time.
for profile, repeats in (("repeatable", True), ("soak", False)):
    settings.register_profile(
        profile,
        deadline=None,
        derandomize=repeats,
        suppress_health_check=[HealthCheck.too_slow],
    )


def pytest_configure(config: pytest.Config) -> None:
    if not config.getoption("--hypothesis-profile"):
        soak = "soak" in config.getoption("-m")
        settings.load_profile("soak" if soak else "repeatable")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if "soak" not in config.getoption("-m"):
        for item in items:
            if item.get_closest_marker("soak") is not None:
                item.add_marker(pytest.mark.skip(reason="takes minutes: -m soak runs it"))
    if config.getoption("--examples") is not None:
        for item in items:
            if "examples" in getattr(item, "fixturenames", ()):
                item.add_marker(pytest.mark.timeout(0))  # thousands take longer than a hang


@pytest.fixture(scope="session")
def examples(request: pytest.FixtureRequest) -> int | None:
    """How many random examples were asked for; None if it was not said."""
    number: int | None = request.config.getoption("--examples")
    return number


@pytest.fixture(scope="session")
def ranks() -> Iterator[RankPools]:
    """`ranks(4).run(fn, *args)` runs an importable function on four ranks; see `RankPool.run`."""
    pools = RankPools()
    yield pools
    pools.close()


@pytest.fixture
def fake_group(request: pytest.FixtureRequest) -> Iterator[dist.ProcessGroup]:
    """Makes this process rank 0 of a group whose collectives do nothing, of two ranks.

    Another size: `@pytest.mark.parametrize("fake_group", [8], indirect=True)`.
    """
    world_size = getattr(request, "param", 2)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world_size)
    assert dist.group.WORLD is not None
    try:
        yield dist.group.WORLD
    finally:
        dist.destroy_process_group()
        clean_up()
