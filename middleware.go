package inbox

import (
	"crypto/sha256"
	"errors"
	"fmt"

	"github.com/ThreeDotsLabs/watermill"
	"github.com/ThreeDotsLabs/watermill/message"
)

// Middleware is a Watermill middleware, for a router or for one handler. It runs the handler in a transaction that
// msg.Context() carries (see [TxFromContext]), claims the message as the transaction's first statement, and commits
// before Watermill acknowledges the message. A duplicate does not reach the handler; it succeeds, and returns the
// messages that the first delivery recorded as long as they were not published ([OutputsReplay]).
//
// An error of the handler is returned untouched, after the rollback, and without messages. So is a panic: it goes on with
// its own value. A handler that ends its goroutine (runtime.Goexit) makes the message nacked, which Watermill itself
// would not do. On every exit the message has the context that it came with.
//
// Add it last, so that it is the innermost middleware:
// PoisonQueueWithFilter, Retry (with ResetContextOnRetry), Timeout, Recoverer, then this one.
func (d *Deduplicator) Middleware(h message.HandlerFunc) message.HandlerFunc {
	return func(msg *message.Message) ([]*message.Message, error) {
		if d.config.Skip != nil && d.config.Skip(msg) {
			run := &delivery{Deduplicator: d, msg: msg}
			run.event.Context, run.event.Outcome = msg.Context(), Bypassed //nolint:fatcontext // for the observer
			run.observe()
			return h(msg)
		}
		return d.handle(msg, h)
	}
}

func (d *Deduplicator) handle(msg *message.Message, h message.HandlerFunc) ([]*message.Message, error) {
	former := msg.Context()
	run := &delivery{Deduplicator: d, msg: msg, handler: h}
	run.event.Context = former //nolint:fatcontext // for the observer
	returned := false
	defer func() {
		msg.SetContext(former)
		run.observe()
		if returned {
			return
		}
		if value := recover(); value != nil {
			panic(value)
		}
		// Neither returned nor panicked: runtime.Goexit. The router would leave the message without an answer.
		d.config.Logger.Error("The handler ended its goroutine: rolled back, message nacked", errGoexit, run.logFields())
		msg.Nack()
	}()

	outputs, err := run.handleMessage(former)
	returned = true
	return outputs, err
}

var errGoexit = errors.New("inbox: runtime.Goexit in a handler")

// key returns the key of a message in its stored form.
func (d *Deduplicator) key(msg *message.Message) (Key, error) {
	consumer := d.config.Consumer
	if consumer == "" {
		consumer = message.HandlerNameFromCtx(msg.Context())
	}
	id, err := d.config.MessageID(msg)
	if err != nil {
		if errors.Is(err, ErrInvalidKey) {
			return Key{}, err
		}
		return Key{}, fmt.Errorf("%w: read the message ID: %w", ErrInvalidKey, err)
	}
	return Key{Consumer: consumer, MessageID: id}.Normalize()
}

func fingerprint(msg *message.Message) []byte {
	sum := sha256.Sum256(msg.Payload)
	return sum[:]
}

// settled tells whether the message was acknowledged or refused already.
func settled(msg *message.Message) (acked, nacked bool) {
	select {
	case <-msg.Acked():
		acked = true
	case <-msg.Nacked():
		nacked = true
	default:
	}
	return acked, nacked
}

func (r *delivery) logFields() watermill.LogFields {
	fields := watermill.LogFields{"handler_name": r.claim.Key.Consumer}
	if r.msg != nil {
		fields["message_uuid"] = r.msg.UUID
	}
	return fields
}
