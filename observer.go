package inbox

import (
	"context"
	"errors"
	"time"
)

// Observer is told of every delivery, once it ended, by the goroutine that processed it. It is called concurrently.
type Observer interface {
	ObserveDelivery(DeliveryEvent)
}

// Outcome is how a delivery ended.
type Outcome string

const (
	// Processed means that the handler's effects are committed.
	Processed Outcome = "processed"

	// Duplicate means that the message was processed before; the handler did not run.
	Duplicate Outcome = "duplicate"

	// InFlight means that another delivery of the message held it for longer than LockTimeout.
	InFlight Outcome = "in_flight"

	// Failed means rolled back, or ended in an error that leaves open whether it was committed. It will be delivered again.
	Failed Outcome = "failed"

	// Bypassed means that [Config].Skip sent the message to the handler without the inbox.
	Bypassed Outcome = "bypassed"
)

// DeliveryEvent describes one delivery.
type DeliveryEvent struct {
	// Context is the context that the message came with, for tracing.
	Context context.Context

	// Key is the key in its stored form. It is zero if it was invalid, or the delivery was bypassed.
	Key Key

	// Outcome is how the delivery ended.
	Outcome Outcome

	// Err is the error that the delivery ended with; nil unless the outcome is Failed or InFlight, and also nil when the
	// handler panicked.
	Err error

	// Claim is the time spent waiting for other deliveries of the key, for a connection, and on the claim; Handler is
	// the time in the handler, and what its outbox took; Commit is the time spent on the seal and the COMMIT. All attempts are added up.
	Claim, Handler, Commit time.Duration

	// Retries counts the attempts after the first one, each in a new transaction.
	Retries int

	// Outputs is how many messages were recorded, or for a duplicate handed out again.
	Outputs int
}

// end notes how the delivery ended, and returns err.
func (r *delivery) end(err error) error {
	switch {
	case err == nil && r.record != nil:
		r.event.Outcome = Duplicate
	case err == nil:
		r.event.Outcome = Processed
	case errors.Is(err, ErrInFlight):
		r.event.Outcome, r.event.Err = InFlight, err
	default:
		r.event.Outcome, r.event.Err = Failed, err
	}
	return err
}

func (r *delivery) observe() {
	if r.config.Observer == nil {
		return
	}
	if r.event.Outcome == "" { // panicked, or ended its goroutine
		r.event.Outcome = Failed
	}
	r.event.Key = r.claim.Key
	r.config.Observer.ObserveDelivery(r.event)
}
