package outbox_test

import (
	"context"
	stdsql "database/sql"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill"
	"github.com/ThreeDotsLabs/watermill-sql/v4/pkg/sql"
	"github.com/ThreeDotsLabs/watermill/components/cqrs"
	"github.com/ThreeDotsLabs/watermill/message"
	_ "github.com/go-sql-driver/mysql"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	_ "github.com/jackc/pgx/v5/stdlib"
	"go.uber.org/goleak"

	"github.com/watermill-inbox/inbox/internal/testenv"
	"github.com/watermill-inbox/inbox/internal/txctx"
	"github.com/watermill-inbox/inbox/outbox"
	"github.com/watermill-inbox/inbox/sqlstore"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// database is one way to reach a database, with an outbox of the test's own.
type database struct {
	config outbox.Config
	db     sql.Beginner
	begin  func(t testing.TB) transaction
	count  func(t testing.TB) int // rows in the outbox
}

// transaction is a handler's, in the context that an inbox would give it.
type transaction struct {
	ctx              context.Context
	commit, rollback func()
}

func eachDatabase(t *testing.T, test func(t *testing.T, d database)) {
	t.Helper()
	for name, open := range map[string]func(*testing.T) database{
		"pgx":                 func(t *testing.T) database { return openPgx(t, pgx.QueryExecModeCacheStatement) },
		"pgx exec":            func(t *testing.T) database { return openPgx(t, pgx.QueryExecModeExec) },
		"pgx simple protocol": func(t *testing.T) database { return openPgx(t, pgx.QueryExecModeSimpleProtocol) },
		"pgx stdlib": func(t *testing.T) database {
			return openSQL(t, "pgx", testenv.PostgreSQL(t), sqlstore.PostgreSQL, `"watermill_%s"`)
		},
		"MariaDB": func(t *testing.T) database {
			return openSQL(t, "mysql", testenv.MariaDB(t), sqlstore.MySQL, "`watermill_%s`")
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			d := open(t)
			if err := outbox.InitializeSchema(t.Context(), d.db, d.config); err != nil {
				t.Fatal(err)
			}
			test(t, d)
		})
	}
}

func newConfig(dialect sqlstore.Dialect) outbox.Config {
	return outbox.Config{Dialect: dialect, Topic: "outbox_" + strings.ToLower(watermill.NewULID())}
}

func openPgx(t testing.TB, mode pgx.QueryExecMode) database {
	t.Helper()
	config, err := pgxpool.ParseConfig(testenv.PostgreSQL(t))
	if err != nil {
		t.Fatal(err)
	}
	config.ConnConfig.DefaultQueryExecMode = mode
	pool, err := pgxpool.NewWithConfig(t.Context(), config)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(pool.Close)
	d := database{config: newConfig(sqlstore.PostgreSQL), db: sql.BeginnerFromPgx(pool)}
	name := `"watermill_` + d.config.Topic + `"`
	t.Cleanup(func() { _, _ = pool.Exec(context.Background(), "DROP TABLE IF EXISTS "+name) })
	d.begin = func(t testing.TB) transaction {
		t.Helper()
		tx, err := pool.Begin(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		return newTransaction(t, tx,
			func() error { return tx.Commit(context.Background()) }, func() error { return tx.Rollback(context.Background()) })
	}
	d.count = func(t testing.TB) (n int) {
		t.Helper()
		if err := pool.QueryRow(t.Context(), "SELECT count(*) FROM "+name).Scan(&n); err != nil {
			t.Fatal(err)
		}
		return n
	}
	return d
}

func openSQL(t testing.TB, driver, dsn string, dialect sqlstore.Dialect, tableName string) database {
	t.Helper()
	db, err := stdsql.Open(driver, dsn)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = db.Close() })
	d := database{config: newConfig(dialect), db: sql.BeginnerFromStdSQL(db)}
	name := fmt.Sprintf(tableName, d.config.Topic)
	t.Cleanup(func() { _, _ = db.ExecContext(context.Background(), "DROP TABLE IF EXISTS "+name) })
	d.begin = func(t testing.TB) transaction {
		t.Helper()
		tx, err := db.BeginTx(context.Background(), nil)
		if err != nil {
			t.Fatal(err)
		}
		return newTransaction(t, tx, tx.Commit, tx.Rollback)
	}
	d.count = func(t testing.TB) (n int) {
		t.Helper()
		if err := db.QueryRowContext(t.Context(), "SELECT count(*) FROM "+name).Scan(&n); err != nil {
			t.Fatal(err)
		}
		return n
	}
	return d
}

func newTransaction(t testing.TB, native any, commit, rollback func() error) transaction {
	t.Helper()
	check := func(end func() error) func() {
		return func() {
			t.Helper()
			if err := end(); err != nil {
				t.Error(err)
			}
		}
	}
	return transaction{
		ctx:    txctx.With(t.Context(), &txctx.Frame{Native: native}),
		commit: check(commit), rollback: check(rollback),
	}
}

// broker is a publisher that a test scripts and inspects.
type broker struct {
	mu        sync.Mutex
	refuse    func(topic string, msg *message.Message) error
	published []string // topic/UUID
	messages  map[string]*message.Message
	calls     int
}

func (b *broker) Publish(topic string, msgs ...*message.Message) error {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.calls++
	for _, msg := range msgs {
		if b.refuse != nil {
			if err := b.refuse(topic, msg); err != nil {
				return err
			}
		}
		if b.messages == nil {
			b.messages = map[string]*message.Message{}
		}
		b.messages[msg.UUID] = msg
		b.published = append(b.published, topic+"/"+msg.UUID)
	}
	return nil
}

func (b *broker) Close() error { return nil }

func (b *broker) seen() []string {
	b.mu.Lock()
	defer b.mu.Unlock()
	return slices.Clone(b.published)
}

func newRelay(t testing.TB, d database, b message.Publisher, adjust ...func(*outbox.RelayConfig)) *outbox.Relay {
	t.Helper()
	config := outbox.RelayConfig{Config: d.config, DB: d.db, Publisher: b, RetryInterval: 10 * time.Millisecond}
	for _, f := range adjust {
		f(&config)
	}
	relay, err := outbox.NewRelay(config)
	if err != nil {
		t.Fatal(err)
	}
	return relay
}

func publish(t *testing.T, d database, ctx context.Context, topic string, ids ...string) { //nolint:revive // reads better
	t.Helper()
	publisher, err := outbox.NewPublisher(d.config)
	if err != nil {
		t.Fatal(err)
	}
	var msgs []*message.Message
	for _, id := range ids {
		msgs = append(msgs, message.NewMessageWithContext(ctx, id, []byte(id)))
	}
	if err := publisher.Publish(topic, msgs...); err != nil {
		t.Fatal(err)
	}
}

func relayOnce(t testing.TB, relay *outbox.Relay) int {
	t.Helper()
	n, err := relay.RunOnce(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	return n
}

func TestMessagesArriveIffTheTransactionCommits(t *testing.T) {
	t.Parallel()
	eachDatabase(t, func(t *testing.T, d database) {
		b := &broker{}
		relay := newRelay(t, d, b)
		undone, done := d.begin(t), d.begin(t)
		publish(t, d, undone.ctx, "payments", "undone")
		publish(t, d, done.ctx, "payments", "1", "2")
		publish(t, d, done.ctx, "ledger", "3")
		if n := relayOnce(t, relay); n != 0 {
			t.Errorf("%d messages relayed before the commit", n)
		}
		undone.rollback()
		done.commit()
		if n := relayOnce(t, relay); n != 3 {
			t.Errorf("%d messages claimed", n)
		}
		if got, want := b.seen(), []string{"payments/1", "payments/2", "ledger/3"}; !slices.Equal(got, want) {
			t.Errorf("published %q", got)
		}
		if n := d.count(t); n != 0 {
			t.Errorf("%d rows left", n)
		}
	})
}

func TestOpenTransactionHoldsUpNothing(t *testing.T) {
	t.Parallel()
	eachDatabase(t, func(t *testing.T, d database) {
		b := &broker{}
		relay := newRelay(t, d, b)
		early, late := d.begin(t), d.begin(t)
		publish(t, d, early.ctx, "t", "early")
		publish(t, d, late.ctx, "t", "late")
		late.commit()
		relayOnce(t, relay)
		if got := b.seen(); !slices.Equal(got, []string{"t/late"}) {
			t.Errorf("published %q beside an open transaction", got)
		}
		early.commit()
		relayOnce(t, relay)
		if got := b.seen(); !slices.Equal(got, []string{"t/late", "t/early"}) {
			t.Errorf("published %q", got)
		}
	})
}

func TestHandlersPublishWhileARelayWaitsForTheBroker(t *testing.T) {
	t.Parallel()
	eachDatabase(t, func(t *testing.T, d database) {
		first := d.begin(t)
		publish(t, d, first.ctx, "t", "1")
		first.commit()
		entered, leave := make(chan struct{}), make(chan struct{})
		relay := newRelay(t, d, &broker{refuse: func(string, *message.Message) error {
			close(entered)
			<-leave
			return nil
		}})
		ended := make(chan error)
		go func() {
			_, err := relay.RunOnce(context.Background())
			ended <- err
		}()
		<-entered
		second := d.begin(t)
		publish(t, d, second.ctx, "t", "2")
		second.commit()

		other := &broker{}
		if n := relayOnce(t, newRelay(t, d, other)); n != 1 || !slices.Equal(other.seen(), []string{"t/2"}) {
			t.Errorf("another relay claimed %d and published %q", n, other.seen())
		}
		close(leave)
		if err := <-ended; err != nil {
			t.Error(err)
		}
	})
}

func TestEveryByteArrives(t *testing.T) {
	t.Parallel()
	large := make([]byte, 5<<20)
	for i := range large {
		large[i] = byte(i * 7)
	}
	payloads := map[string][]byte{
		"nil": nil, "empty": {}, "protobuf": {0x08, 0x96, 0x01, 0x12, 0x00}, "invalid UTF-8": {0xff, 0xfe}, "NUL": []byte("a\x00b\\u0000"),
		"JSON": []byte(`{"a":"<&>"}`), "large": large,
	}
	eachDatabase(t, func(t *testing.T, d database) {
		publisher, err := outbox.NewPublisher(d.config)
		if err != nil {
			t.Fatal(err)
		}
		tx := d.begin(t)
		for uuid, payload := range payloads {
			msg := message.NewMessageWithContext(tx.ctx, uuid, payload)
			msg.Metadata.Set("odd \u0000 <&> \u2028", "värde \u0000")
			if err := publisher.Publish("t", msg); err != nil {
				t.Fatalf("%s: %v", uuid, err)
			}
		}
		tx.commit()
		b := &broker{}
		relayOnce(t, newRelay(t, d, b))
		for uuid, payload := range payloads {
			msg := b.messages[uuid]
			if msg == nil || string(msg.Payload) != string(payload) || msg.Metadata.Get("odd \u0000 <&> \u2028") != "värde \u0000" {
				t.Errorf("%s: changed or lost", uuid)
			}
		}
	})
}

func TestPublishOutsideOfATransactionIsAnError(t *testing.T) {
	t.Parallel()
	publisher, err := outbox.NewPublisher(outbox.Config{Dialect: sqlstore.PostgreSQL})
	if err != nil {
		t.Fatal(err)
	}
	carrying := func() context.Context { return txctx.With(t.Context(), &txctx.Frame{Native: new(stdsql.Tx)}) }
	one := carrying()
	for _, tt := range []struct {
		name  string
		topic string
		msgs  []*message.Message
		want  string
	}{
		{"plain message", "t", []*message.Message{message.NewMessage("1", nil)}, "no inbox transaction"},
		{"one of two", "t", []*message.Message{message.NewMessageWithContext(one, "1", nil), message.NewMessage("2", nil)}, "no inbox"},
		{"two transactions", "t", []*message.Message{
			message.NewMessageWithContext(one, "1", nil), message.NewMessageWithContext(carrying(), "2", nil),
		}, "different transactions"},
		{"nil", "t", []*message.Message{nil}, "1 of 1 is nil"},
		{"UUID", "t", []*message.Message{message.NewMessageWithContext(one, "\xff", nil)}, "UTF-8"},
		{"topic", "\xff", []*message.Message{message.NewMessageWithContext(one, "1", nil)}, "UTF-8"},
		{"no topic", "", []*message.Message{message.NewMessageWithContext(one, "1", nil)}, "destination topic"},
		{"metadata", "t", []*message.Message{withMetadata(message.NewMessageWithContext(one, "1", nil), "n", "\xff")}, "UTF-8"},
		{"metadata name", "t", []*message.Message{withMetadata(message.NewMessageWithContext(one, "1", nil), "\xff", "v")}, "UTF-8"},
	} {
		if err := publisher.Publish(tt.topic, tt.msgs...); err == nil || !strings.Contains(err.Error(), tt.want) {
			t.Errorf("%s: %v", tt.name, err)
		}
	}
	if err := publisher.Publish("t"); err != nil {
		t.Errorf("no messages: %v", err)
	}
}

func withMetadata(msg *message.Message, name, value string) *message.Message {
	msg.Metadata.Set(name, value)
	return msg
}

func TestFailedPublishIsTriedAgainInOrder(t *testing.T) {
	t.Parallel()
	eachDatabase(t, func(t *testing.T, d database) {
		b := &broker{}
		refused := true
		b.refuse = func(_ string, msg *message.Message) error {
			if refused && msg.UUID == "2" {
				return errors.New("scripted")
			}
			return nil
		}
		tx := d.begin(t)
		publish(t, d, tx.ctx, "a", "1", "2", "3")
		publish(t, d, tx.ctx, "b", "4")
		tx.commit()
		relay := newRelay(t, d, b)
		if n, err := relay.RunOnce(t.Context()); n != 4 || err == nil || !strings.Contains(err.Error(), `"2"`) {
			t.Errorf("%d claimed, error %v", n, err)
		}
		if n := d.count(t); n != 2 {
			t.Errorf("%d rows left, want 2 and 3", n)
		}
		refused = false
		relayOnce(t, relay)
		// The call for 1 to 3 failed at 2, after the broker took 1.
		if got, want := b.seen(), []string{"a/1", "a/1", "b/4", "a/2", "a/3"}; !slices.Equal(got, want) {
			t.Errorf("published %q", got)
		}
	})
}

func TestFailingTopicDoesNotHoldUpOthers(t *testing.T) {
	t.Parallel()
	eachDatabase(t, func(t *testing.T, d database) {
		tx := d.begin(t)
		publish(t, d, tx.ctx, "broken", "1", "2", "3", "4", "5")
		publish(t, d, tx.ctx, "fine", "6")
		tx.commit()
		b := &broker{refuse: func(topic string, _ *message.Message) error {
			if topic == "broken" {
				return errors.New("scripted")
			}
			return nil
		}}
		relay := newRelay(t, d, b, func(c *outbox.RelayConfig) { c.BatchSize = 2 })
		runUntil(t, relay, func() bool { return slices.Contains(b.seen(), "fine/6") })
		if got := b.seen(); !slices.Equal(got, []string{"fine/6"}) {
			t.Errorf("published %q", got)
		}
	})
}

func TestForeignRowsHoldUpNothingAndStay(t *testing.T) {
	t.Parallel()
	eachDatabase(t, func(t *testing.T, d database) {
		tx := d.begin(t)
		publish(t, d, tx.ctx, "t", "1")
		tx.commit()
		foreign := `INSERT INTO "watermill_%s" (uuid, payload) VALUES ('x', 'no envelope')`
		if d.config.Dialect == sqlstore.MySQL {
			foreign = "INSERT INTO `watermill_%s` (uuid, payload) VALUES ('x', 'no envelope')"
		}
		if _, err := d.db.ExecContext(t.Context(), fmt.Sprintf(foreign, d.config.Topic)); err != nil {
			t.Fatal(err)
		}
		tx = d.begin(t)
		publish(t, d, tx.ctx, "t", "2")
		tx.commit()
		b := &broker{}
		if _, err := newRelay(t, d, b).RunOnce(t.Context()); err == nil || !strings.Contains(err.Error(), "envelope") {
			t.Errorf("error %v", err)
		}
		if got := b.seen(); !slices.Equal(got, []string{"t/1", "t/2"}) || d.count(t) != 1 {
			t.Errorf("published %q, %d rows left", got, d.count(t))
		}
	})
}

func TestPublisherThatPanicsLosesNothing(t *testing.T) {
	t.Parallel()
	eachDatabase(t, func(t *testing.T, d database) {
		tx := d.begin(t)
		publish(t, d, tx.ctx, "t", "1")
		tx.commit()
		var once sync.Once
		b := &broker{refuse: func(string, *message.Message) error {
			once.Do(func() { panic("scripted") })
			return nil
		}}
		runUntil(t, newRelay(t, d, b), func() bool { return len(b.seen()) == 1 })
	})
}

func TestSeveralRelaysPublishEachMessageOnce(t *testing.T) {
	t.Parallel()
	const messages, relays = 2000, 3
	eachDatabase(t, func(t *testing.T, d database) {
		b := &broker{}
		ctx, cancel := context.WithCancel(t.Context())
		var wg sync.WaitGroup
		for range relays {
			relay := newRelay(t, d, b)
			wg.Go(func() { _ = relay.Run(ctx) })
		}
		for from := 0; from < messages; from += 100 {
			tx := d.begin(t)
			var ids []string
			for i := range 100 {
				ids = append(ids, fmt.Sprint(from+i))
			}
			publish(t, d, tx.ctx, "t", ids...)
			tx.commit()
		}
		waitFor(t, func() bool { return len(b.seen()) >= messages })
		cancel()
		wg.Wait()
		if got := b.seen(); len(got) != messages || len(b.messages) != messages || d.count(t) != 0 {
			t.Errorf("%d published, %d different ones, %d rows left", len(got), len(b.messages), d.count(t))
		}
	})
}

func TestBatchIsFinishedWhenTheContextEnds(t *testing.T) {
	t.Parallel()
	eachDatabase(t, func(t *testing.T, d database) {
		tx := d.begin(t)
		publish(t, d, tx.ctx, "t", "1", "2")
		tx.commit()
		ctx, cancel := context.WithCancel(t.Context())
		b := &broker{refuse: func(string, *message.Message) error {
			cancel()
			return nil
		}}
		if err := newRelay(t, d, b).Run(ctx); err != nil {
			t.Error(err)
		}
		if len(b.seen()) != 2 || d.count(t) != 0 {
			t.Errorf("published %q, %d rows left", b.seen(), d.count(t))
		}
	})
}

// TestRelayThatDiesBeforeItsCommitPublishesAgain has the connection cut after the publish: what a kill looks like.
func TestRelayThatDiesBeforeItsCommitPublishesAgain(t *testing.T) {
	t.Parallel()
	eachDatabase(t, func(t *testing.T, d database) {
		tx := d.begin(t)
		publish(t, d, tx.ctx, "t", "1", "2")
		tx.commit()
		b := &broker{}
		dying := newRelay(t, d, b, func(c *outbox.RelayConfig) {
			c.DB = dyingBeginner{c.DB}
		})
		if _, err := dying.RunOnce(t.Context()); err == nil {
			t.Error("no error")
		}
		if n := d.count(t); n != 2 {
			t.Errorf("%d rows left", n)
		}
		relayOnce(t, newRelay(t, d, b))
		if got := b.seen(); !slices.Equal(got, []string{"t/1", "t/2", "t/1", "t/2"}) || d.count(t) != 0 {
			t.Errorf("published %q, %d rows left", got, d.count(t))
		}
	})
}

// dyingBeginner rolls back where it should commit.
type dyingBeginner struct{ sql.Beginner }

func (b dyingBeginner) BeginTx(ctx context.Context, options *stdsql.TxOptions) (sql.Tx, error) {
	tx, err := b.Beginner.BeginTx(ctx, options)
	return dyingTx{tx}, err
}

type dyingTx struct{ sql.Tx }

func (tx dyingTx) Commit() error { return errors.Join(errors.New("connection lost"), tx.Rollback()) }

func TestPluginRelaysWhileTheRouterRuns(t *testing.T) {
	t.Parallel()
	eachDatabase(t, func(t *testing.T, d database) {
		tx := d.begin(t)
		publish(t, d, tx.ctx, "t", "1")
		tx.commit()
		b := &broker{}
		router, err := message.NewRouter(message.RouterConfig{}, watermill.NopLogger{})
		if err != nil {
			t.Fatal(err)
		}
		router.AddPlugin(newRelay(t, d, b).Plugin(t.Context()))
		ended := make(chan error)
		go func() { ended <- router.Run(context.Background()) }()
		waitFor(t, func() bool { return len(b.seen()) == 1 })
		if err := router.Close(); err != nil {
			t.Error(err)
		}
		if err := <-ended; err != nil {
			t.Error(err)
		}
		// goleak tells whether the relay ended.
	})
}

func TestCQRSBusJoinsTheTransaction(t *testing.T) {
	t.Parallel()
	type OrderPaid struct{ ID int }
	eachDatabase(t, func(t *testing.T, d database) {
		publisher, err := outbox.NewPublisher(d.config)
		if err != nil {
			t.Fatal(err)
		}
		bus, err := cqrs.NewEventBusWithConfig(publisher, cqrs.EventBusConfig{
			GeneratePublishTopic: func(cqrs.GenerateEventPublishTopicParams) (string, error) { return "events", nil },
			Marshaler:            cqrs.JSONMarshaler{},
		})
		if err != nil {
			t.Fatal(err)
		}
		if err := bus.Publish(t.Context(), OrderPaid{1}); err == nil {
			t.Error("published without a transaction")
		}
		tx := d.begin(t)
		if err := bus.Publish(tx.ctx, OrderPaid{2}); err != nil {
			t.Fatal(err)
		}
		tx.commit()
		b := &broker{}
		if relayOnce(t, newRelay(t, d, b)); len(b.seen()) != 1 {
			t.Errorf("published %q", b.seen())
		}
	})
}

func TestSchemaIsCreatedByManyAtOnce(t *testing.T) {
	t.Parallel()
	eachDatabase(t, func(t *testing.T, d database) {
		config := newConfig(d.config.Dialect)
		t.Cleanup(func() {
			quote := `"`
			if config.Dialect == sqlstore.MySQL {
				quote = "`"
			}
			_, _ = d.db.ExecContext(context.Background(), "DROP TABLE "+quote+"watermill_"+config.Topic+quote)
		})
		var wg sync.WaitGroup
		for range 20 {
			wg.Go(func() {
				if err := outbox.InitializeSchema(context.Background(), d.db, config); err != nil {
					t.Error(err)
				}
			})
		}
		wg.Wait()
	})
}

func TestWatermillsForwarderReadsTheOutbox(t *testing.T) {
	t.Parallel()
	eachDatabase(t, func(t *testing.T, d database) {
		var adapter sql.SchemaAdapter = sql.PostgreSQLQueueSchema{}
		var offsets sql.OffsetsAdapter = sql.PostgreSQLQueueOffsetsAdapter{}
		if d.config.Dialect == sqlstore.MySQL {
			adapter, offsets = sql.MySQLQueueSchema{}, sql.MySQLQueueOffsetsAdapter{}
		}
		tx := d.begin(t)
		publish(t, d, tx.ctx, "t", "1")
		tx.commit()
		subscriber, err := sql.NewSubscriber(d.db, sql.SubscriberConfig{SchemaAdapter: adapter, OffsetsAdapter: offsets}, nil)
		if err != nil {
			t.Fatal(err)
		}
		messages, err := subscriber.Subscribe(t.Context(), d.config.Topic)
		if err != nil {
			t.Fatal(err)
		}
		msg := <-messages
		if !strings.Contains(string(msg.Payload), `"destination_topic":"t"`) {
			t.Errorf("payload %s", msg.Payload)
		}
		msg.Ack()
		if err := subscriber.Close(); err != nil {
			t.Error(err)
		}
	})
}

func TestConfigFaultsAreNamed(t *testing.T) {
	t.Parallel()
	_, sqlite := outbox.NewPublisher(outbox.Config{Dialect: sqlstore.SQLite})
	if sqlite == nil || !strings.Contains(sqlite.Error(), "OutputsReplay") {
		t.Errorf("SQLite: %v", sqlite)
	}
	_, err := outbox.NewRelay(outbox.RelayConfig{
		Config:    outbox.Config{Topic: `a"; DROP TABLE x; --`},
		BatchSize: -1, PollInterval: -1, RetryInterval: -1, StatementTimeout: -1,
	})
	for _, field := range []string{"Dialect", "Topic", "DB", "Publisher", "BatchSize", "PollInterval", "RetryInterval", "StatementTimeout"} {
		if err == nil || !strings.Contains(err.Error(), "Config."+field) {
			t.Errorf("%v does not name %s", err, field)
		}
	}
}

// runUntil runs the relay until done reports true.
func runUntil(t *testing.T, relay *outbox.Relay, done func() bool) {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error)
	go func() { ended <- relay.Run(ctx) }()
	waitFor(t, done)
	cancel()
	if err := <-ended; err != nil {
		t.Error(err)
	}
}

func waitFor(t *testing.T, done func() bool) {
	t.Helper()
	for deadline := time.Now().Add(30 * time.Second); !done(); time.Sleep(5 * time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatal("not within 30 seconds")
		}
	}
}
