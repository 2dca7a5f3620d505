"""Host-side scheduling: requests, slots, pages and the plan of each dispatch. No jax in here."""
