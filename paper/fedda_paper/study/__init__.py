"""A fair comparison of methods: equal budgets on validation data, then runs on fresh partitions (docs/study.md)."""
