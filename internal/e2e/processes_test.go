package e2e_test

import (
	"context"
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill"
	"github.com/ThreeDotsLabs/watermill-amqp/v3/pkg/amqp"
	"github.com/ThreeDotsLabs/watermill/message"
	amqp091 "github.com/rabbitmq/amqp091-go"

	"github.com/watermill-inbox/inbox/internal/testenv"
)

// openShop returns a shop with tables of the test's own.
func openShop(t *testing.T, store, dsn string) *shop {
	t.Helper()
	s := &shop{Store: store, DSN: dsn, Prefix: "e2e_" + strings.ToLower(watermill.NewULID()) + "_"}
	if err := s.open(t.Context()); err != nil {
		t.Fatal(err)
	}
	if err := s.create(t.Context()); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if store != "sqlite" { // its file is gone with the test's folder
			if err := s.drop(context.Background()); err != nil {
				t.Error(err)
			}
		}
		s.close()
	})
	return s
}

func sqliteDSN(t *testing.T) string {
	t.Helper()
	return "file:" + filepath.Join(t.TempDir(), "shop.db") +
		"?_pragma=journal_mode(WAL)&_pragma=busy_timeout(10000)&_pragma=synchronous(NORMAL)"
}

// process is a consumer in a process of its own.
type process struct {
	t      *testing.T
	config string
	cmd    *exec.Cmd
	output strings.Builder
	kills  int
}

func newProcess(t *testing.T, c consumer) *process {
	t.Helper()
	config, err := json.Marshal(c)
	if err != nil {
		t.Fatal(err)
	}
	p := &process{t: t, config: string(config)}
	t.Cleanup(func() {
		if p.cmd != nil {
			if t.Failed() { // to see what it does
				_ = p.cmd.Process.Signal(syscall.SIGQUIT)
				_ = p.cmd.Wait()
			} else {
				p.kill()
			}
		}
		if t.Failed() {
			t.Logf("consumer:\n%s", p.output.String())
		}
	})
	return p
}

func (p *process) start() {
	p.t.Helper()
	p.cmd = exec.Command(os.Args[0])
	// watermill-amqp has data races when it reconnects. They are in the output, and do not count.
	p.cmd.Env = append(os.Environ(), consumerVariable+"="+p.config, "GORACE=exitcode=0")
	p.cmd.Stdout, p.cmd.Stderr = &p.output, &p.output
	p.cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	if err := p.cmd.Start(); err != nil {
		p.t.Fatal(err)
	}
}

func (p *process) kill() {
	_ = p.cmd.Process.Kill()
	_ = p.cmd.Wait()
	p.cmd = nil
	p.kills++
}

// terminate ends the process as a deployment does, and checks that it ends well.
func (p *process) terminate() {
	p.t.Helper()
	_ = p.cmd.Process.Signal(syscall.SIGTERM)
	if err := p.cmd.Wait(); err != nil {
		p.t.Errorf("consumer: %v\n%s", err, p.output.String())
	}
	p.cmd = nil
}

// declare declares queues: RabbitMQ drops what is published to one that is not there.
func declare(t *testing.T, url string, queues ...string) {
	t.Helper()
	subscriber, err := amqp.NewSubscriber(amqpConfig(url), watermill.NopLogger{})
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = subscriber.Close() }()
	for _, queue := range queues {
		if err := subscriber.SubscribeInitialize(queue); err != nil {
			t.Fatal(err)
		}
	}
}

// publishOrders publishes n orders, each at least copies times, and waits for the broker's confirmations.
func publishOrders(t *testing.T, url, topic string, n int, copies func() int) {
	t.Helper()
	publishRange(t, url, topic, 0, n, func(int) int { return copies() })
}

func publishRange(t *testing.T, url, topic string, first, end int, copies func(int) int) {
	t.Helper()
	const publishers = 4
	var wg sync.WaitGroup
	for from := range publishers {
		wg.Go(func() {
			var publisher *amqp.Publisher
			defer func() {
				if publisher != nil {
					_ = publisher.Close()
				}
			}()
			for i := first + from; i < end; i += publishers {
				for range copies(i) {
					id := "order-" + strconv.Itoa(i)
					for attempt := 0; ; attempt++ { // the broker may be down for the moment
						var err error
						if publisher == nil {
							publisher, err = amqp.NewPublisher(amqpConfig(url), watermill.NopLogger{})
						}
						if err == nil {
							if err = publisher.Publish(topic, message.NewMessage(id, []byte(id))); err == nil {
								break
							}
						}
						if attempt > 600 {
							t.Error(err)
							return
						}
						time.Sleep(100 * time.Millisecond)
					}
				}
			}
		})
	}
	wg.Wait()
}

func twice() int { return 2 }

// waitFor polls until done reports true.
func waitFor(t *testing.T, timeout time.Duration, what string, done func() bool) {
	t.Helper()
	for deadline := time.Now().Add(timeout); !done(); time.Sleep(20 * time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatalf("%s: not within %s", what, timeout)
		}
	}
}

// wantCounts checks what is in the database.
func wantCounts(t *testing.T, s *shop, want map[string]int) {
	t.Helper()
	for query, n := range want {
		got, err := s.count(t.Context(), query)
		if err != nil {
			t.Fatal(err)
		}
		if got != n {
			t.Errorf("%s: %d, want %d", query, got, n)
		}
	}
}

// wantEmptyQueue checks that the broker has nothing left, delivered or not, and removes the queue.
func wantEmptyQueue(t *testing.T, url, queue string) {
	t.Helper()
	conn, err := amqp091.Dial(url)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = conn.Close() }()
	channel, err := conn.Channel()
	if err != nil {
		t.Fatal(err)
	}
	declared, err := channel.QueueDeclarePassive(queue, true, false, false, false, nil)
	if err != nil {
		t.Fatal(err)
	}
	if declared.Messages != 0 || declared.Consumers != 0 {
		t.Errorf("queue %s: %d messages, %d consumers", queue, declared.Messages, declared.Consumers)
	}
	if _, err := channel.QueueDelete(queue, false, false, false); err != nil {
		t.Error(err)
	}
}

// seeded returns a source of random numbers whose seed is in the log.
func seeded(t *testing.T) *rand.Rand {
	t.Helper()
	seed := uint64(time.Now().UnixNano())
	if text := os.Getenv("INBOX_TEST_SEED"); text != "" {
		var err error
		if seed, err = strconv.ParseUint(text, 10, 64); err != nil {
			t.Fatal(err)
		}
	}
	t.Logf("INBOX_TEST_SEED=%d", seed)
	return rand.New(rand.NewPCG(seed, 0))
}

// TestEveryOrderOnceThoughConsumersAreKilled feeds PostgreSQL from RabbitMQ.
func TestEveryOrderOnceThoughConsumersAreKilled(t *testing.T) {
	t.Parallel()
	const orders = 2000
	random := seeded(t)
	url := testenv.RabbitMQ(t)
	s := openShop(t, "pgx", testenv.PostgreSQL(t))
	declare(t, url, s.Prefix+"orders", s.Prefix+"payments", s.Prefix+"poison")
	publishOrders(t, url, s.Prefix+"orders", orders, twice)

	p := newProcess(t, consumer{Shop: *s, RabbitMQ: url, Handlers: []string{"take_from_stock"}})
	processed := func() int {
		n, err := s.count(t.Context(), "SELECT count(*) FROM {inbox}")
		if err != nil {
			t.Fatal(err)
		}
		return n
	}
	for kill := range 5 {
		p.start()
		// In the middle of the work, at a random point.
		goal := orders*(kill+1)/8 + random.IntN(orders/10)
		waitFor(t, 10*time.Second, fmt.Sprintf("%d orders", goal), func() bool { return processed() >= goal })
		p.kill()
	}
	p.start()
	waitFor(t, time.Minute, "all orders", func() bool { return processed() == orders })
	queue := s.Prefix + "orders"
	waitFor(t, time.Minute, "an empty queue", func() bool { return ready(t, url, queue) == 0 })
	p.terminate()

	wantCounts(t, s, map[string]int{
		"SELECT -pieces FROM {stock}":              orders,
		"SELECT count(*) FROM {effects}":           orders,
		"SELECT count(DISTINCT id) FROM {effects}": orders,
		"SELECT count(*) FROM {inbox}":             orders,
	})
	wantEmptyQueue(t, url, queue)
	wantEmptyQueue(t, url, s.Prefix+"poison")
}

// ready returns how many messages of a queue wait for a consumer.
func ready(t *testing.T, url, queue string) int {
	t.Helper()
	conn, err := amqp091.Dial(url)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = conn.Close() }()
	channel, err := conn.Channel()
	if err != nil {
		t.Fatal(err)
	}
	declared, err := channel.QueueDeclarePassive(queue, true, false, false, false, nil)
	if err != nil {
		t.Fatal(err)
	}
	return declared.Messages
}

// TestOutputsSurviveADeathAroundTheirPublish kills the process between the commit and the publish, and between the
// publish and the acknowledgment.
func TestOutputsSurviveADeathAroundTheirPublish(t *testing.T) {
	t.Parallel()
	for store, dsn := range map[string]func(*testing.T) string{
		"pgx":    func(t *testing.T) string { return testenv.PostgreSQL(t) },
		"stdlib": func(t *testing.T) string { return testenv.PostgreSQL(t) },
		"mysql":  func(t *testing.T) string { return testenv.MariaDB(t) },
		"sqlite": sqliteDSN,
	} {
		for _, when := range []string{"before", "after"} {
			t.Run(store+"/"+when, func(t *testing.T) {
				t.Parallel()
				url := testenv.RabbitMQ(t)
				s := openShop(t, store, dsn(t))
				declare(t, url, s.Prefix+"orders", s.Prefix+"payments", s.Prefix+"poison")
				publishOrders(t, url, s.Prefix+"orders", 1, func() int { return 1 })
				c := consumer{Shop: *s, RabbitMQ: url, Handlers: []string{"pay", "book"}, DieAt: when, Died: filepath.Join(t.TempDir(), "died")}
				p := newProcess(t, c)
				p.start()
				if err := p.cmd.Wait(); err == nil {
					t.Fatal("the process did not die")
				}
				wantCounts(t, s, map[string]int{"SELECT count(*) FROM {payments}": 1, "SELECT count(*) FROM {inbox} WHERE outputs IS NOT NULL": 1})
				p.start()
				waitFor(t, time.Minute, "the ledger", func() bool {
					n, err := s.count(t.Context(), "SELECT count(*) FROM {ledger}")
					return err == nil && n == 1
				})
				waitFor(t, time.Minute, "the mark", func() bool {
					n, err := s.count(t.Context(), "SELECT count(*) FROM {inbox} WHERE outputs IS NOT NULL")
					return err == nil && n == 0
				})
				p.terminate()
				wantCounts(t, s, map[string]int{"SELECT count(*) FROM {payments}": 1, "SELECT count(*) FROM {ledger}": 1})
				wantEmptyQueue(t, url, s.Prefix+"orders")
				wantEmptyQueue(t, url, s.Prefix+"payments")
			})
		}
	}
}

// TestPipelineIsExactThoughBothStagesAreKilled runs orders → payments → ledger, each stage in a process of its own.
func TestPipelineIsExactThoughBothStagesAreKilled(t *testing.T) {
	t.Parallel()
	orders := number(t, "INBOX_E2E_MESSAGES", 1000)
	random := seeded(t)
	url := testenv.RabbitMQ(t)
	s := openShop(t, "pgx", testenv.PostgreSQL(t))
	declare(t, url, s.Prefix+"orders", s.Prefix+"payments", s.Prefix+"poison")
	publishOrders(t, url, s.Prefix+"orders", orders, twice)
	stages := []*process{
		newProcess(t, consumer{Shop: *s, RabbitMQ: url, Handlers: []string{"pay"}}),
		newProcess(t, consumer{Shop: *s, RabbitMQ: url, Handlers: []string{"book"}}),
	}
	for _, stage := range stages {
		stage.start()
	}
	booked := func() int {
		n, err := s.count(t.Context(), "SELECT count(*) FROM {ledger}")
		if err != nil {
			t.Fatal(err)
		}
		return n
	}
	for kill := range 6 {
		goal := orders*(kill+1)/10 + random.IntN(orders/10)
		waitFor(t, 5*time.Minute, fmt.Sprintf("%d bookings", goal), func() bool { return booked() >= goal })
		stage := stages[kill%2]
		stage.kill()
		stage.start()
	}
	waitFor(t, 5*time.Minute, "all bookings", func() bool {
		return booked() >= orders && ready(t, url, s.Prefix+"orders") == 0 && ready(t, url, s.Prefix+"payments") == 0
	})
	for _, stage := range stages {
		stage.terminate()
	}
	wantCounts(t, s, map[string]int{
		"SELECT count(*) FROM {payments}":           orders,
		"SELECT count(DISTINCT id) FROM {payments}": orders,
		"SELECT count(*) FROM {ledger}":             orders,
		"SELECT count(DISTINCT id) FROM {ledger}":   orders,
		"SELECT count(*) FROM {inbox}":              2 * orders,
	})
	wantEmptyQueue(t, url, s.Prefix+"orders")
	wantEmptyQueue(t, url, s.Prefix+"payments")
}

// TestRollingDeploymentIsExact ends one of two instances after the other, while they work.
func TestRollingDeploymentIsExact(t *testing.T) {
	t.Parallel()
	const orders = 1000
	url := testenv.RabbitMQ(t)
	s := openShop(t, "pgx", testenv.PostgreSQL(t))
	declare(t, url, s.Prefix+"orders", s.Prefix+"payments", s.Prefix+"poison")
	publishOrders(t, url, s.Prefix+"orders", orders, twice)
	c := consumer{Shop: *s, RabbitMQ: url, Handlers: []string{"take_from_stock"}}
	instances := []*process{newProcess(t, c), newProcess(t, c)}
	for _, instance := range instances {
		instance.start()
	}
	for round := range 6 {
		goal := orders * (round + 1) / 8
		waitFor(t, time.Minute, fmt.Sprintf("%d orders", goal), func() bool {
			n, err := s.count(t.Context(), "SELECT count(*) FROM {inbox}")
			return err == nil && n >= goal
		})
		instance := instances[round%2]
		instance.terminate()
		instance.start()
	}
	waitFor(t, time.Minute, "an empty queue", func() bool {
		n, err := s.count(t.Context(), "SELECT count(*) FROM {inbox}")
		return err == nil && n == orders && ready(t, url, s.Prefix+"orders") == 0
	})
	for _, instance := range instances {
		instance.terminate()
	}
	wantCounts(t, s, map[string]int{"SELECT count(*) FROM {effects}": orders, "SELECT count(*) FROM {inbox}": orders})
	wantEmptyQueue(t, url, s.Prefix+"orders")
	wantEmptyQueue(t, url, s.Prefix+"poison")
}

func number(t *testing.T, variable string, otherwise int) int {
	t.Helper()
	text := os.Getenv(variable)
	if text == "" {
		return otherwise
	}
	n, err := strconv.Atoi(text)
	if err != nil {
		t.Fatal(err)
	}
	return n
}
