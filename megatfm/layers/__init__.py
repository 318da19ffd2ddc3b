"""The parts that models are made of: one variant a file, entered by name. No part knows of ranks or groups."""
