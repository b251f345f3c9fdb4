package outbox_test

import (
	"context"
	stdsql "database/sql"
	"errors"
	"slices"
	"testing"

	"github.com/ThreeDotsLabs/watermill"
	"github.com/ThreeDotsLabs/watermill-sql/v4/pkg/sql"
	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/ThreeDotsLabs/watermill/pubsub/gochannel"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/watermill-inbox/inbox"
	"github.com/watermill-inbox/inbox/internal/testenv"
	"github.com/watermill-inbox/inbox/outbox"
	"github.com/watermill-inbox/inbox/sqlstore"
	"github.com/watermill-inbox/inbox/sqlstore/pgxstore"
)

// inboxStore is a store with its table.
type inboxStore interface {
	inbox.Store
	InitializeSchema(ctx context.Context) error
}

// TestHandlersOutputsGoThroughTheOutbox runs a router whose handler returns one message and publishes another one to a
// second topic. It fails at first, and is delivered again after it succeeded.
func TestHandlersOutputsGoThroughTheOutbox(t *testing.T) {
	t.Parallel()
	for name, open := range map[string]func(*testing.T, string) (inboxStore, sql.Beginner, sqlstore.Dialect){
		"pgx": func(t *testing.T, table string) (inboxStore, sql.Beginner, sqlstore.Dialect) {
			t.Helper()
			pool, err := pgxpool.New(t.Context(), testenv.PostgreSQL(t))
			if err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() {
				_, _ = pool.Exec(context.Background(), "DROP TABLE "+table)
				pool.Close()
			})
			store, err := pgxstore.New(pool, pgxstore.Config{Table: table})
			if err != nil {
				t.Fatal(err)
			}
			return store, sql.BeginnerFromPgx(pool), sqlstore.PostgreSQL
		},
		"pgx stdlib": func(t *testing.T, table string) (inboxStore, sql.Beginner, sqlstore.Dialect) {
			t.Helper()
			return openStore(t, "pgx", testenv.PostgreSQL(t), sqlstore.PostgreSQL, table)
		},
		"MariaDB": func(t *testing.T, table string) (inboxStore, sql.Beginner, sqlstore.Dialect) {
			t.Helper()
			return openStore(t, "mysql", testenv.MariaDB(t), sqlstore.MySQL, table)
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			config := newConfig(0)
			store, db, dialect := open(t, "inbox_of_"+config.Topic)
			config.Dialect = dialect
			if err := errors.Join(store.InitializeSchema(t.Context()), outbox.InitializeSchema(t.Context(), db, config)); err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() {
				quote := map[sqlstore.Dialect]string{sqlstore.PostgreSQL: `"`, sqlstore.MySQL: "`"}[dialect]
				_, _ = db.ExecContext(context.Background(), "DROP TABLE "+quote+"watermill_"+config.Topic+quote)
			})
			publisher, err := outbox.NewPublisher(config)
			if err != nil {
				t.Fatal(err)
			}
			dedup, err := inbox.NewDeduplicator(inbox.Config{Store: store, Outputs: inbox.OutputsOutbox, Outbox: publisher})
			if err != nil {
				t.Fatal(err)
			}

			in := gochannel.NewGoChannel(gochannel.Config{BlockPublishUntilSubscriberAck: true}, watermill.NopLogger{})
			router, err := message.NewRouter(message.RouterConfig{}, watermill.NopLogger{})
			if err != nil {
				t.Fatal(err)
			}
			direct := &broker{}
			runs := 0
			router.AddMiddleware(dedup.Middleware)
			router.AddHandler("pay", "orders", in, "payments", direct, func(msg *message.Message) ([]*message.Message, error) {
				runs++
				if err := publisher.Publish("audit", message.NewMessageWithContext(msg.Context(), "audit-1", nil)); err != nil {
					return nil, err
				}
				if runs == 1 {
					return nil, errors.New("scripted")
				}
				return []*message.Message{message.NewMessage("payment-1", []byte{0xff})}, nil
			})
			ended := make(chan error)
			go func() { ended <- router.Run(context.Background()) }()
			<-router.Running()
			for range 2 {
				if err := in.Publish("orders", message.NewMessage("order-1", nil)); err != nil {
					t.Fatal(err)
				}
			}
			if err := errors.Join(router.Close(), <-ended); err != nil {
				t.Error(err)
			}

			out := &broker{}
			relay, err := outbox.NewRelay(outbox.RelayConfig{Config: config, DB: db, Publisher: out})
			if err != nil {
				t.Fatal(err)
			}
			if n := relayOnce(t, relay); n != 2 || runs != 2 {
				t.Errorf("%d messages relayed, %d runs", n, runs)
			}
			if got := out.seen(); !slices.Equal(got, []string{"audit/audit-1", "payments/payment-1"}) {
				t.Errorf("published %q", got)
			}
			if got := direct.seen(); len(got) != 0 {
				t.Errorf("the router published %q", got)
			}
		})
	}
}

func openStore(t *testing.T, driver, dsn string, dialect sqlstore.Dialect, table string) (inboxStore, sql.Beginner, sqlstore.Dialect) {
	t.Helper()
	db, err := stdsql.Open(driver, dsn)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_, _ = db.ExecContext(context.Background(), "DROP TABLE "+table)
		_ = db.Close()
	})
	store, err := sqlstore.New(db, sqlstore.Config{Dialect: dialect, Table: table})
	if err != nil {
		t.Fatal(err)
	}
	return store, sql.BeginnerFromStdSQL(db), dialect
}
