"""FLuRKA: EVA and FLuRKA-EVA, which only its experiments use, its claims on costs, and the bound on its error."""
