"""An elastic job whose workers are killed, stopped and started for as long as it takes."""
