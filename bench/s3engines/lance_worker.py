"""A process that has LanceDB: reads commands, one JSON object a line, and answers each with one."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import lancedb
import numpy as np
import pyarrow

TABLE = "items"
BATCH = 10_000


class Worker:
    def __init__(self, uri: str, directory: str, storage_options: dict):
        self.directory = Path(directory)
        self.questions = np.load(self.directory / "queries.npy")
        self.database = lancedb.connect(uri, storage_options=storage_options)
        self.table = None

    def load(self, index_type: str) -> dict:
        base = np.load(self.directory / "base.npy", mmap_mode="r")
        schema = pyarrow.schema([
            ("id", pyarrow.int32()), ("vector", pyarrow.list_(pyarrow.float32(), base.shape[1])),
        ])

        def batches():
            for first in range(0, len(base), BATCH):
                rows = np.ascontiguousarray(base[first : first + BATCH])
                vectors = pyarrow.FixedSizeListArray.from_arrays(
                    pyarrow.array(rows.reshape(-1)), base.shape[1]
                )
                ids = pyarrow.array(np.arange(first, first + len(rows), dtype=np.int32))
                yield pyarrow.RecordBatch.from_arrays([ids, vectors], schema=schema)

        started = time.monotonic()
        self.table = self.database.create_table(TABLE, batches(), schema=schema)
        accepted = time.monotonic() - started
        self.table.create_index(metric="cosine", index_type=index_type)  # all else is the library's choice
        (index,) = self.table.list_indices()
        statistics = self.table.index_stats(index.name)
        return {"accepted_seconds": accepted, "index": str(index), "statistics": str(statistics)}

    def open(self) -> dict:
        self.table = self.database.open_table(TABLE)
        return {}

    def search(self, question: int, nprobes: int, refine_factor: int | None) -> dict:
        started = time.perf_counter()
        query = self.table.search(self.questions[question]).distance_type("cosine").nprobes(nprobes)
        if refine_factor:
            query = query.refine_factor(refine_factor)
        found = query.limit(10).select(["id"]).to_arrow()
        return {"rows": found["id"].to_pylist(), "milliseconds": (time.perf_counter() - started) * 1e3}


def main() -> None:
    worker = Worker(**json.loads(sys.stdin.readline()))
    print("{}", flush=True)
    for line in sys.stdin:
        message = json.loads(line)
        print(json.dumps(getattr(worker, message.pop("do"))(**message)), flush=True)


if __name__ == "__main__":
    main()
