"""Reports: self-contained HTML pages about runs; ``run.write`` makes that of one run."""
