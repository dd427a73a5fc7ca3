# Everything is `python3 -m dev COMMAND` underneath; PG=16 chooses the other Postgres.
PG ?= 18
PG_CONFIG ?= pg_config
# Arguments for the test runner, for example: make e2e T="tests/test_scan.py -k cursor"
T ?=
# Tests use PROFILE=dev, with debug assertions and failpoints; all else PROFILE=release
export PROFILE
DEV = PG=$(PG) python3 -m dev

.PHONY: help up down psql status env demo test e2e unit smoke soak lint fmt install bench bench-load bench-s3 clean

help:
	@sed -n 's/^\([a-z0-9-]*\):.*## /\1: /p' Makefile

up: ## builds, installs and starts the development cluster
	@$(DEV) up

down: ## stops it
	@$(DEV) down

clean: ## stops it and removes its data
	@$(DEV) clean

status: ## says what runs where
	@$(DEV) status

env: ## prints shell exports for the cluster: eval "$$(make -s env)"
	@$(DEV) env

demo: ## starts the cluster, indexes 10,000 passages in the bucket, shows a cold and a warm query
	@$(DEV) demo

psql: ## opens psql in the cluster
	@$(DEV) psql

test: ## everything: unit and property tests, then the end-to-end tests (PG=16 for the other Postgres)
	@$(DEV) test

unit: ## the Rust tests, with an S3 server for those of the store (T="..." goes to cargo test)
	@$(DEV) unit $(T)

e2e: ## the end-to-end tests alone (T="..." goes to pytest)
	@$(DEV) e2e $(T)

smoke: ## a few end-to-end tests of everything
	@$(DEV) smoke

soak: ## random tests for an hour each (T="600": ten minutes), and all faults and crashes
	@$(DEV) soak $(T)

install: ## installs into the Postgres of PG_CONFIG=/path/to/pg_config
	@PG_CONFIG=$(PG_CONFIG) python3 -m dev install

lint: ## formatting, clippy, dependency rules
	@$(DEV) lint

fmt: ## formats the Rust code
	@cargo fmt --all

bench: ## compares with pgvector (T="cold" or T="soak 600": the other benchmarks, bench/README.md)
	@$(DEV) bench $(T)

bench-load: ## open loop: the highest rate of searches that is answered in time (T="--engine hnsw")
	@$(DEV) bench load $(T)

bench-s3: ## the object store side, beside other engines on the same S3 server
	@$(DEV) bench s3 $(T)
