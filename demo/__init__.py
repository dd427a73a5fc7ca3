"""`make demo`: real passages, an index in a bucket, a cold and a warm query."""
