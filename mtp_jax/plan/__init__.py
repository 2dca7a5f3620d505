"""Plans: which layers each stage runs and what each device holds, from `config.json` alone."""
