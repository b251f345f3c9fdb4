package inbox

import (
	"context"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"
)

// Store opens transactions that own a claim. It is the only thing that a database has to bring along: order, retries,
// panic safety and rollback are the [Deduplicator]'s, written once for every store.
//
// A Store is safe for concurrent use. The errors of Begin and of [Tx].Commit reach Watermill as they are, so they say what
// failed, as "inbox: claim key: …" does, and keep the driver's error in their chain. Package storetest checks an
// implementation against this contract.
type Store interface {
	// Begin opens a transaction and claims the key as its first statement.
	//
	// The outcomes:
	//   - The claim is ours: [Tx.Recorded] is nil, and until Commit or Rollback no other transaction can claim the key.
	//   - A committed, sealed record of the key was seen: Tx.Recorded is that record.
	//   - Another transaction held the key for longer than claim.LockTimeout: an error that wraps [ErrInFlight].
	//   - Anything else, also a claim that can neither be made nor be proven a duplicate: an error.
	//
	// After an error nothing is left open. The context bounds Begin, and nothing that comes after it: the transaction
	// stays usable when ctx ends.
	Begin(ctx context.Context, claim Claim) (Tx, error)
}

// Tx is a transaction that a [Store] began. It is used by one goroutine at a time, and ends with a Commit that returns
// nil or with a Rollback, one of which always follows.
type Tx interface {
	// Recorded returns what an earlier, committed delivery of the key left, or nil if the claim is this transaction's.
	Recorded() *Record

	// Native returns the transaction as the handler gets it: a *sql.Tx, a pgx.Tx.
	Native() any

	// Commit records the outputs, proves that the transaction still owns its claim, and commits. Nil means: claim,
	// outputs and the handler's writes are durable together. After an error either all of it happened or nothing did
	// (a lost reply); the next Begin for the key finds out which.
	//
	// The context bounds Commit as far as the driver allows. Outputs are kept in order; UUID, metadata and payload
	// byte for byte. With no outputs nothing is stored. The messages are not kept.
	Commit(ctx context.Context, outputs []*message.Message) error

	// Rollback undoes everything, the claim included. Once the transaction ended it does nothing and returns nil.
	Rollback(ctx context.Context) error
}

// Claim is what a delivery asks of a [Store].
type Claim struct {
	// Key is what is claimed, already in its stored form (see [Key.Normalize]).
	Key Key

	// LockTimeout bounds the wait for another transaction that holds the key, and no other statement. It is positive,
	// and shorter than the time left until the context's deadline.
	LockTimeout time.Duration

	// Fingerprint is stored with the record. Nil if [Config].Fingerprint is off.
	Fingerprint []byte

	// Message is a copy of the delivery, whose payload and metadata are stored with the record. Nil if
	// [Config].StorePayload is off.
	Message *message.Message
}

// Record is what a committed delivery left in the inbox.
type Record struct {
	// ReceivedAt is when the key was claimed, and ProcessedAt when the record was sealed, by the database's clock.
	ReceivedAt, ProcessedAt time.Time

	// Fingerprint is the claim's fingerprint, or nil if it had none.
	Fingerprint []byte

	// Outputs are the recorded messages while they were not published, and empty afterwards. Their metadata is not nil.
	Outputs []*message.Message
}

// LossDetector is implemented by a [Tx] that knows whether its connection was lost, and the transaction with it: a failure
// that is not the message's fault.
type LossDetector interface {
	// ConnectionLost is called after Rollback.
	ConnectionLost() bool
}

// TransientClassifier is implemented by stores that can tell errors which go away when the whole transaction is run
// again: serialization failures, deadlocks, a busy SQLite file.
type TransientClassifier interface {
	// IsTransient reports whether err, or an error that it wraps, says that its transaction was undone and may succeed
	// when it is tried again.
	IsTransient(err error) bool
}

// ErrorExplainer is implemented by stores that know what usually lies behind an error that a handler returned.
type ErrorExplainer interface {
	// ExplainError returns a hint for the log, or "".
	ExplainError(err error) string
}

// OutputsMarker is implemented by stores that can forget recorded outputs once they were published. Without it every
// duplicate publishes them again.
type OutputsMarker interface {
	// MarkOutputsPublished drops the outputs recorded under the keys, which are in their stored form. Unknown keys and
	// keys without outputs are passed over.
	MarkOutputsPublished(ctx context.Context, keys []Key) error
}
