// Command two-stage passes orders on to payments and payments on to a ledger, with an inbox at each stage. Handlers return
// the messages for the next stage, and publishing them fails half of the time: they are recorded with the handler's
// effects and handed out again until they were published, with the same UUIDs, so that the next inbox absorbs repeats.
package main

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"log"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strconv"
	"sync/atomic"
	"time"

	"github.com/ThreeDotsLabs/watermill"
	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/ThreeDotsLabs/watermill/message/router/middleware"
	"github.com/ThreeDotsLabs/watermill/pubsub/gochannel"
	"modernc.org/sqlite"

	"github.com/watermill-inbox/inbox"
	"github.com/watermill-inbox/inbox/sqlstore"
)

const orders = 200

func main() {
	log.SetFlags(0)
	if err := run(context.Background()); err != nil {
		log.Fatal(err)
	}
}

func run(ctx context.Context) error {
	dir, err := os.MkdirTemp("", "inbox-two-stage-")
	if err != nil {
		return err
	}
	defer func() { _ = os.RemoveAll(dir) }()
	connector, err := sqlite.NewConnector("file:" + filepath.Join(dir, "shop.db") +
		"?_pragma=journal_mode(WAL)&_pragma=busy_timeout(10000)")
	if err != nil {
		return err
	}
	db := sql.OpenDB(sqlstore.Guard(connector))
	defer db.Close()
	if _, err := db.Exec("CREATE TABLE payments (id TEXT); CREATE TABLE ledger (id TEXT)"); err != nil {
		return err
	}
	store, err := sqlstore.New(db, sqlstore.Config{Dialect: sqlstore.SQLite})
	if err != nil {
		return err
	}
	if err := store.InitializeSchema(ctx); err != nil {
		return err
	}
	ledger := &progress{booked: make(chan struct{}, orders)}
	dedup, err := inbox.NewDeduplicator(inbox.Config{Store: store, Observer: ledger})
	if err != nil {
		return err
	}

	broker := gochannel.NewGoChannel(gochannel.Config{OutputChannelBuffer: orders}, watermill.NopLogger{})
	router, err := message.NewRouter(message.RouterConfig{}, watermill.NopLogger{})
	if err != nil {
		return err
	}
	router.AddMiddleware(middleware.Recoverer, dedup.Middleware)

	flaky := &unreliable{Publisher: broker}
	router.AddHandler("pay", "orders", broker, "payments", flaky,
		func(msg *message.Message) ([]*message.Message, error) {
			ctx := msg.Context()
			if _, err := store.Executor(ctx).ExecContext(ctx, "INSERT INTO payments VALUES (?)", string(msg.Payload)); err != nil {
				return nil, err
			}
			return []*message.Message{message.NewMessage(watermill.NewUUID(), msg.Payload)}, nil
		})
	router.AddConsumerHandler("book", "payments", broker, func(msg *message.Message) error {
		ctx := msg.Context()
		_, err := store.Executor(ctx).ExecContext(ctx, "INSERT INTO ledger VALUES (?)", string(msg.Payload))
		return err
	})
	go func() {
		if err := router.Run(ctx); err != nil {
			log.Print(err)
		}
	}()
	<-router.Running()

	for i := range orders {
		order := message.NewMessage(watermill.NewUUID(), []byte("order "+strconv.Itoa(i)))
		if err := broker.Publish("orders", order, order.Copy()); err != nil { // twice
			return err
		}
	}
	for range orders {
		<-ledger.booked
	}
	if err := router.Close(); err != nil {
		return err
	}
	flush, cancel := context.WithTimeout(ctx, 5*time.Second)
	defer cancel()
	if err := dedup.Close(flush); err != nil {
		return err
	}

	var payments, entries, distinct int
	row := db.QueryRow("SELECT (SELECT count(*) FROM payments), count(*), count(DISTINCT id) FROM ledger")
	if err := row.Scan(&payments, &entries, &distinct); err != nil {
		return err
	}
	fmt.Printf("orders     %d, each published twice\n", orders)
	fmt.Printf("publishes  %d failed, %d of them after the payment had been published\n", flaky.failed.Load(), flaky.late.Load())
	fmt.Printf("duplicates %d skipped\n", ledger.duplicates.Load())
	fmt.Printf("payments   %d\n", payments)
	fmt.Printf("ledger     %d entries, %d of them different\n", entries, distinct)
	if payments != orders || entries != orders || distinct != orders {
		return errors.New("the ledger is not exact")
	}
	return nil
}

// progress is told of every delivery.
type progress struct {
	booked     chan struct{}
	duplicates atomic.Int64
}

func (p *progress) ObserveDelivery(delivery inbox.DeliveryEvent) {
	switch {
	case delivery.Outcome == inbox.Duplicate:
		p.duplicates.Add(1)
	case delivery.Outcome == inbox.Processed && delivery.Key.Consumer == "book":
		p.booked <- struct{}{}
	}
}

// unreliable is a publisher that fails half of the time: before it published, or after.
type unreliable struct {
	message.Publisher
	failed, late atomic.Int64
}

func (u *unreliable) Publish(topic string, messages ...*message.Message) error {
	luck := rand.N(4)
	if luck == 0 {
		u.failed.Add(1)
		return errors.New("publishing failed")
	}
	err := u.Publisher.Publish(topic, messages...)
	if luck == 1 && err == nil {
		u.failed.Add(1)
		u.late.Add(1)
		return errors.New("the broker did not confirm")
	}
	return err
}
