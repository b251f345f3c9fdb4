package inbox

import "errors"

var (
	// ErrDuplicate is returned by [Deduplicator.Process] when the key was processed before. Deliveries through
	// [Deduplicator.Middleware] that are duplicates succeed instead.
	ErrDuplicate = errors.New("inbox: duplicate")

	// ErrInvalidKey means that a message has no usable key: an empty message ID or consumer, or a MessageID function
	// that failed. Delivering it again does not help.
	ErrInvalidKey = errors.New("inbox: invalid key")

	// ErrInFlight means that another delivery of the message was being processed for longer than LockTimeout. It says
	// nothing of how that one ends: the message has to be delivered again.
	ErrInFlight = errors.New("inbox: message in flight")

	// ErrPayloadMismatch means that a message has the key of one that was processed, but another payload.
	ErrPayloadMismatch = errors.New("inbox: payload differs from the one processed under this key")
)
