package dialect

import "errors"

var (
	// ErrRowGone means that a row kept the claim from being made, but was not there to be looked at: its transaction
	// rolled back, or it was deleted.
	ErrRowGone = errors.New("the key could neither be claimed nor be found")

	// ErrClaimLost means that a transaction must not be committed as what its claim stands for.
	ErrClaimLost = errors.New("the transaction does not own its claim any more (" + HintEnded +
		"; or the handler left its search_path changed, and the table is another one)")

	// ErrAborted means that COMMIT would be a ROLLBACK.
	ErrAborted = errors.New("the transaction is aborted: " + HintAborted)
)
