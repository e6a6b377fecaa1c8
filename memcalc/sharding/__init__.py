"""How sharding engines run a step, as requests around units: what replays of one rank of many are made of."""
