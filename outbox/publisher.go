package outbox

import (
	"context"
	stdsql "database/sql"
	"errors"
	"fmt"
	"unicode/utf8"

	"github.com/ThreeDotsLabs/watermill"
	"github.com/ThreeDotsLabs/watermill-sql/v4/pkg/sql"
	"github.com/ThreeDotsLabs/watermill/components/forwarder"
	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/jackc/pgx/v5"

	"github.com/watermill-inbox/inbox/internal/txctx"
)

// insertBatchSize keeps a statement's parameters below the databases' limits.
const insertBatchSize = 500

// Publisher is a message.Publisher that writes messages to the outbox in the inbox transaction that their contexts
// carry. It has no connection of its own, and is safe for concurrent use.
//
// In a handler, messages need the context of the incoming one: use message.NewMessageWithContext(msg.Context(), …), or
// publish through Watermill's CQRS buses with that context. Messages returned from the handler get it from
// [inbox.OutputsOutbox].
type Publisher struct {
	config Config
}

var _ message.Publisher = (*Publisher)(nil)

// NewPublisher returns a Publisher, or the faults of the configuration.
func NewPublisher(config Config) (*Publisher, error) {
	if err := config.Validate(); err != nil {
		return nil, err
	}
	config.setDefaults()
	return &Publisher{config: config}, nil
}

// Publish writes the messages to the outbox, in order, to be published to topic once their transaction committed.
//
// It is an error if a message's context carries no inbox transaction, or not the same one as the others': nothing is ever
// published directly. It is also an error if the topic, a UUID or metadata are not valid UTF-8, which the envelope could
// not carry. Payloads can be any bytes. A message without a UUID gets one. After an error of the database, the
// transaction can not be relied on: return it from the handler.
func (p *Publisher) Publish(topic string, messages ...*message.Message) error {
	if len(messages) == 0 {
		return nil
	}
	tx, err := transactionOf(messages)
	if err != nil {
		return fmt.Errorf("outbox: publish to %q: %w", topic, err)
	}
	enveloped := make([]*message.Message, len(messages))
	for i, msg := range messages {
		if err := checkUTF8(topic, msg); err != nil {
			return fmt.Errorf("outbox: publish to %q: message %q: %w", topic, msg.UUID, err)
		}
		uuid := msg.UUID
		if uuid == "" {
			uuid = watermill.NewUUID()
		}
		enveloped[i] = message.NewMessageWithContext(msg.Context(), uuid, msg.Payload)
		enveloped[i].Metadata = msg.Metadata
	}
	table, err := sql.NewPublisher(tx, sql.PublisherConfig{SchemaAdapter: insertAdapter{table: p.config.table()}}, nil)
	if err != nil {
		return fmt.Errorf("outbox: publish to %q: %w", topic, err)
	}
	publisher := forwarder.NewPublisher(table, forwarder.PublisherConfig{ForwarderTopic: p.config.Topic})
	for len(enveloped) > 0 {
		n := min(len(enveloped), insertBatchSize)
		if err := publisher.Publish(topic, enveloped[:n]...); err != nil {
			return fmt.Errorf("outbox: publish to %q: %w", topic, err)
		}
		enveloped = enveloped[n:]
	}
	return nil
}

// Close does nothing: the Publisher holds nothing.
func (p *Publisher) Close() error { return nil }

// transactionOf returns the one transaction that the contexts of all messages carry.
func transactionOf(messages []*message.Message) (sql.ContextExecutor, error) {
	var common any
	for i, msg := range messages {
		if msg == nil {
			return nil, fmt.Errorf("message %d of %d is nil", i+1, len(messages))
		}
		tx := transactionFrom(msg.Context())
		switch {
		case tx == nil:
			return nil, fmt.Errorf("the context of message %q carries no inbox transaction: "+
				"make it with message.NewMessageWithContext(msg.Context(), …)", msg.UUID)
		case common == nil:
			common = tx
		case common != tx:
			return nil, errors.New("the messages' contexts carry different transactions")
		}
	}
	if tx, ok := common.(*stdsql.Tx); ok {
		return sql.TxFromStdSQL(tx), nil
	}
	return sql.TxFromPgx(common.(pgx.Tx)), nil
}

// transactionFrom returns the innermost transaction of either type.
func transactionFrom(ctx context.Context) any {
	frame := txctx.Find(ctx, func(f *txctx.Frame) bool {
		switch f.Native.(type) {
		case *stdsql.Tx, pgx.Tx:
			return true
		}
		return false
	})
	if frame == nil {
		return nil
	}
	return frame.Native
}

func checkUTF8(topic string, msg *message.Message) error {
	if !utf8.ValidString(topic) {
		return errors.New("the topic is not valid UTF-8")
	}
	if !utf8.ValidString(msg.UUID) {
		return errors.New("the UUID is not valid UTF-8")
	}
	for name, value := range msg.Metadata {
		if !utf8.ValidString(name) || !utf8.ValidString(value) {
			return fmt.Errorf("metadata field %q is not valid UTF-8", name)
		}
	}
	return nil
}

// insertAdapter is the part of a watermill-sql schema that its publisher uses. It leaves the metadata column alone, since
// the envelope carries the metadata: watermill-sql sends it as bytes, which PostgreSQL refuses for a JSON column in those
// modes of pgx in which the driver does not ask for the column's type.
type insertAdapter struct {
	sql.SchemaAdapter // none: the publisher only inserts
	table             table
}

func (a insertAdapter) InsertQuery(params sql.InsertQueryParams) (sql.Query, error) {
	args := make([]any, 0, 2*len(params.Msgs))
	for _, msg := range params.Msgs {
		args = append(args, msg.UUID, []byte(msg.Payload))
	}
	return sql.Query{Query: a.table.insert(len(params.Msgs)), Args: args}, nil
}
