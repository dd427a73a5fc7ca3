"""Benchmarks: `make bench` and bench/README.md."""
