"""Text from a trained model: open a run (`load`), choose tokens (`generate`, `sampling`), decode them (`text`)."""
