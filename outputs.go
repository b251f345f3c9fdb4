package inbox

import (
	"context"
	"errors"
	"fmt"

	"github.com/ThreeDotsLabs/watermill"
	"github.com/ThreeDotsLabs/watermill/message"
)

// OutputMode says what becomes of the messages that a handler returns. The router publishes after the middleware, so
// after the commit; a publish that fails there must not lose them.
type OutputMode int

const (
	// OutputsReplay records the messages with the claim, in the handler's transaction, and hands them to the router.
	// While the router did not acknowledge the message, every duplicate hands the recorded ones out again: the same
	// UUIDs, metadata and payloads, in the same order. It relies on the broker to redeliver what was not acknowledged,
	// as the inbox itself does.
	OutputsReplay OutputMode = iota

	// OutputsOutbox publishes the messages through [Config].Outbox, in the handler's transaction, to the router's
	// publish topic. The router gets none.
	OutputsOutbox

	// OutputsReject makes it an error to return messages. It rolls back.
	OutputsReject
)

// accept takes what the handler produced, while its transaction, which ctx carries, is still open. It returns the
// messages to be recorded with the commit.
func (r *delivery) accept(ctx context.Context, produced []*message.Message) ([]*message.Message, error) {
	if len(produced) == 0 {
		return nil, nil
	}
	for i, msg := range produced {
		if msg == nil {
			return nil, fmt.Errorf("inbox: accept outputs: message %d of %d is nil", i+1, len(produced))
		}
	}
	switch r.config.Outputs {
	case OutputsReject:
		return nil, fmt.Errorf("inbox: accept outputs: the handler returned %d messages, which OutputsReject refuses",
			len(produced))
	case OutputsOutbox:
		topic := message.PublishTopicFromCtx(ctx)
		if topic == "" {
			return nil, errors.New("inbox: accept outputs: the handler has no publish topic: add it with AddHandler")
		}
		if err := r.config.Outbox.Publish(topic, freshCopies(ctx, produced)...); err != nil {
			return nil, keepEnd(ctx, fmt.Errorf("inbox: write outputs to the outbox: %w", err))
		}
		return nil, nil
	default:
		return freshCopies(context.WithoutCancel(r.event.Context), produced), nil //nolint:contextcheck // not the transaction's
	}
}

// freshCopies returns messages for a publisher: with a context of their own instead of the one that they were made with
// (msg.Context() in a handler is a cancelled context with a dead transaction by the time of the publish), metadata that
// can be set, and acknowledgments independent of the originals, of which one may be the incoming message itself. A
// message without a UUID gets one, since only a UUID lets the next inbox absorb repeats.
func freshCopies(ctx context.Context, msgs []*message.Message) []*message.Message {
	copies := make([]*message.Message, len(msgs))
	for i, msg := range msgs {
		uuid := msg.UUID
		if uuid == "" {
			uuid = watermill.NewUUID()
		}
		fresh := message.NewMessageWithContext(ctx, uuid, msg.Payload)
		for name, value := range msg.Metadata {
			fresh.Metadata.Set(name, value)
		}
		copies[i] = fresh
	}
	return copies
}
