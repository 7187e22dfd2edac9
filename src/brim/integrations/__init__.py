"""brim inside other people's trainers and harnesses: one file per library, imported on use."""
