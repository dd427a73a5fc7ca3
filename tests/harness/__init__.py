"""What the end-to-end tests share: servers, a fault-injecting S3 proxy, data sets, exact search."""
