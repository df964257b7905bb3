"""What spoils training, found before it does: a file for each kind of bad row, and one table of them."""
