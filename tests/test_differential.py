"""Whatever happens to a table, in whatever order: searches agree with exact search."""

import pytest

from tests.harness import soak
from tests.harness.differential import Schedule, Tally

USUAL_SECONDS = 40


@pytest.mark.soak
@pytest.mark.usefixtures("store_prefix")  # of its own: objects of other tests are not its garbage
@pytest.mark.timeout(soak.seconds(USUAL_SECONDS) + 300)
def test_random_schedules_agree_with_exact_search(cluster, database):
    tally = Tally()
    for seed in soak.seeds(USUAL_SECONDS):
        Schedule(database, seed, tally).run()
    print(f"last seed {seed}: {tally}")
    # One schedule makes some ten searches at the default settings; the mean of so few says nothing.
    assert tally.recall >= 0.94 or tally.schedules < 20
    assert "PANIC" not in cluster.postgres.log.read_text()
