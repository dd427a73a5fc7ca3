"""The development cluster: a private Postgres and a private S3 server. Needs the standard library only."""
